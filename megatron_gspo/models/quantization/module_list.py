"""Which linear modules of a model are quantised: two lists of names, checked against the model.

A name is a module's in checkpoints, such as ``model.layers.0.self_attn.q_proj``; ``*`` stands for
one whole component.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from megatron_gspo.models.families import hugging_face_names
from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelShape

# Modules besides those that end with "norm" whose weight is no linear layer's.
_OTHERS = ("embed_tokens", "embeddings", "norm_f", "conv1d")
# What servers, and for experts Transformers, put into one parameter, which has one type.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_EXPERT = re.compile(r"(.+\.experts)\.\d+\..+")


@dataclass
class ModuleListError(ValueError):
    """A fault of a list of modules."""

    key: str
    """``modules`` or ``exclude``."""

    value: object
    """The entry, or all entries."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.problem}; {self.fix}"


def linear_modules(family: Family, shape: ModelShape) -> list[str]:
    """The linear modules of a model in the order of its layers, router and output layer included.
    Empty where the experts of a layer are one tensor, of which no format is."""
    if family.stacks_experts:
        return []
    modules = (
        name.removesuffix(".weight")
        for name in hugging_face_names(family, shape)
        if name.endswith(".weight")
    )
    return [
        module
        for module in modules
        if not (_last(module).endswith("norm") or _last(module) in _OTHERS)
    ]


def chosen_modules(
    known: Sequence[str], modules: Sequence[str], exclude: Sequence[str]
) -> frozenset[str]:
    """The linear modules of ``known`` that match an entry of ``modules`` and none of
    ``exclude``.

    Raises ``ModuleListError`` for an entry that matches no module, or excluded ones alone, for a
    module that is in neither list, and for modules of one parameter of which some are quantised.
    """
    kept = {module for entry in exclude for module in _matches(entry, known, "exclude")}
    chosen: set[str] = set()
    for entry in modules:
        matches = _matches(entry, known, "modules")
        if kept.issuperset(matches):
            raise ModuleListError(
                "modules", entry, "all modules of this name are excluded", "remove one of the two"
            )
        chosen.update(matches)
    chosen -= kept
    if not chosen:
        raise ModuleListError(
            "modules", list(modules), "names no module", f"use some of {_examples(known)}"
        )
    _check_complete(known, chosen | kept, modules)
    _check_fused(known, chosen, modules)
    return frozenset(chosen)


def without_experts(modules: Iterable[str]) -> list[str]:
    """The modules with the name of a layer's experts, ``...mlp.experts``, in place of each
    expert's.
    """
    return list(dict.fromkeys(_experts_of(module) or module for module in modules))


def _matches(entry: str, known: Sequence[str], key: str) -> list[str]:
    parts = (r"[^.]+" if part == "*" else re.escape(part) for part in entry.split("."))
    pattern = re.compile(r"\.".join(parts))
    matches = [module for module in known if pattern.fullmatch(module)]
    if not matches:
        names = _generalised(known)
        last_names = [_last(name) for name in names]
        close = get_close_matches(entry, names, 1, 0.5)
        close = close or get_close_matches(_last(entry), last_names, 1, 0.5)
        hints = [name for name in names if name.endswith(tuple(close))] if close else []
        fix = f"did you mean {hints[0]}?" if hints else f"use some of {_examples(known)}"
        raise ModuleListError(
            key, entry, "matches no linear module; * stands for one component", fix
        )
    return matches


def _check_complete(known: Sequence[str], named: set[str], modules: Sequence[str]) -> None:
    missing = [module for module in known if module not in named]
    if missing:
        problem = f"{len(missing)} linear modules are in neither list, the first is {missing[0]}"
        fix = f"add {_generalised(missing)[0]} to modules or to exclude"
        raise ModuleListError("modules", list(modules), problem, fix)


def _check_fused(known: Sequence[str], chosen: set[str], modules: Sequence[str]) -> None:
    groups: dict[str, list[str]] = {}
    for module in known:
        groups.setdefault(_parameter_of(module), []).append(module)
    for members in groups.values():
        inside = [module in chosen for module in members]
        if any(inside) and not all(inside):
            listed = members[inside.index(True)]
            other = members[inside.index(False)]
            problem = f"lists {listed} without {other}, and engines keep both in one parameter"
            raise ModuleListError("modules", list(modules), problem, "list both, or exclude both")


def _parameter_of(module: str) -> str:
    """A name of the engines' parameter that holds a module's weight, the same for all modules in
    it."""
    if experts := _experts_of(module):
        return experts
    parent, _, last = module.rpartition(".")
    for names in _FUSED:
        if last in names:
            return f"{parent}.{names[0]}"
    return module


def _experts_of(module: str) -> str:
    match = _EXPERT.fullmatch(module)
    return match[1] if match else ""


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _generalised(modules: Iterable[str]) -> list[str]:
    """The names with ``*`` for every number, each once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", module) for module in modules))


def _examples(known: Sequence[str]) -> str:
    return ", ".join(_generalised(known))
