"""Models that read images too: the family of a whole model, from that of its language model.

The tower that reads images is carried, not trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatron_gspo.models.config_defaults import HFConfig, shown
from megatron_gspo.models.family import Family
from megatron_gspo.models.mapping_rules import Rule
from megatron_gspo.models.model_shape import ModelError, ModelShape


def with_images(
    text: Family,
    model_type: str,
    *,
    starts: Mapping[str, str],
    carried: tuple[str, ...],
    text_types: tuple[str, ...] = (),
    experts: tuple[Rule, ...] | None = None,
) -> Family:
    """The family of whole models, of whose language models ``text`` is.

    Args:
        starts: what names of the language model begin with -> what they begin with here.
        carried: what the names of the other parts begin with.
        text_types: ``model_type`` in the ``text_config``; by default that of ``text``.
        experts: rules of layers with experts, if they are not those of ``text``.
    """
    known = text_types or (text.model_type,)

    def shape(config: HFConfig) -> ModelShape:
        of_text = config["text_config"]
        if isinstance(of_text, dict):
            of_text = of_text.get("model_type", known[0])
        if of_text not in known:
            raise ModelError(
                f"model_type={shown(of_text)} in the text_config of a {model_type} config.json is"
                f" not supported; known: {', '.join(map(repr, known))}"
            )
        text_shape = text.shape(config)
        behind = tuple(_renamed(name, starts) for name in text_shape.carried)
        return replace(text_shape, carried=(*behind, *carried))

    return Family(
        model_type,
        shape,
        {kind: _under(rules, starts) for kind, rules in text.mixers.items()},
        _under(text.dense, starts),
        _under(text.experts if experts is None else experts, starts),
        _under(text.outer, starts),
    )


def _under(rules: Iterable[Rule], starts: Mapping[str, str]) -> tuple[Rule, ...]:
    return tuple(
        replace(
            rule,
            prefix=_renamed(rule.prefix, starts),
            hugging_face=tuple(_renamed(name, starts) for name in rule.hugging_face),
        )
        for rule in rules
    )


def _renamed(name: str, starts: Mapping[str, str]) -> str:
    pattern = "|".join(map(re.escape, starts))
    return re.sub(f"^({pattern})", lambda match: starts[match[1]], name)
