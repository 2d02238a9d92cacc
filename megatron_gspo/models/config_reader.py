"""What several families read from their ``config.json`` in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_gspo.models.config_defaults import HFConfig, check_number, shown
from megatron_gspo.models.model_shape import ModelError, ModelShape, Router
from megatron_gspo.models.rotary import Rotary, Yarn


def decoder(config: HFConfig, *, rope_types: tuple[str, ...] = ("default",)) -> ModelShape:
    """What all families have: a dense decoder with grouped queries and SwiGLU; ``rope_types``: see
    `rotary_of`.

    A family with other kinds of layers reads their ``layer_types`` and gives None in its place.
    """
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    for key, known in (
        ("hidden_act", "silu"),
        ("layer_types", ["full_attention"] * layers),
        ("index_topk", None),
    ):
        only(config, key, known)
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window=true in config.json is not supported; set it to false")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return ModelShape(
        model_type=config["model_type"],
        num_layers=layers,
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rotary=rotary_of(config, head_dim, types=rope_types),
        max_position_embeddings=config["max_position_embeddings"],
        tied_embeddings=config["tie_word_embeddings"],
        moe_layers=(False,) * layers,
    )


def windows_of(config: HFConfig, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer, by its kind in ``layer_types``: ``full_attention`` or
    ``sliding_attention``.
    """
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"layer_types={shown(list(kinds))} in config.json is not supported; give full_attention"
            f" or sliding_attention for each of {layers} layers"
        )
    if "sliding_attention" in kinds and (not isinstance(window, int) or window < 1):
        raise ModelError(
            f"sliding_window={window} in config.json has layers of sliding_attention; give the"
            " window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def only(config: HFConfig, key: str, known: Any) -> None:
    """Raise ``ModelError`` where the config.json has another value of a key than the one that the
    family's layers have; an absent key or null passes."""
    value = config.get(key)
    if value is not None and value != known:
        problem = f"{key}={shown(value)} in a {config['model_type']} config.json is not supported"
        raise ModelError(f"{problem}; known: {shown(known)}")


def softmax_router(config: HFConfig, *, normalize: bool = True) -> Router:
    """A router by the softmax of its logits, without what DeepSeek-V3's have."""
    only(config, "scoring_func", "softmax")
    without_groups(config)
    return Router(normalize=normalize)


def without_groups(config: HFConfig) -> None:
    """Refuse groups of experts and a scaling factor, of a family whose routers have none."""
    for key, known in (("n_group", 1), ("topk_group", 1), ("routed_scaling_factor", 1.0)):
        only(config, key, known)


def sigmoid_experts(config: HFConfig) -> dict[str, Any]:
    """The experts of DeepSeek-V3 and of what followed it: sigmoid scores, a bias for the choice,
    groups, a scaling factor and shared experts without a gate, as fields of ``ModelShape``."""
    for key, known in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
    ):
        only(config, key, known)
    experts = config["n_routed_experts"]
    chosen = config["num_experts_per_tok"]
    groups = config["n_group"]
    chosen_groups = config["topk_group"]
    if experts % groups or chosen_groups > groups or chosen > experts // groups * chosen_groups:
        raise ModelError(
            f"n_group={groups}, topk_group={chosen_groups} in config.json: {chosen} of {experts}"
            " experts can't be chosen from these groups"
        )
    # Megatron rates a group by its best experts, experts / groups of the chosen ones; these models
    # by the best two.
    if chosen_groups < groups and chosen // chosen_groups != 2:
        raise ModelError(
            f"topk_group={chosen_groups} in config.json is not supported with"
            f" num_experts_per_tok={chosen}; known: two experts to a chosen group"
        )
    router = Router("sigmoid", scaling=float(config["routed_scaling_factor"]), expert_bias=True)
    if chosen_groups < groups:
        router = replace(router, groups=groups, chosen_groups=chosen_groups)
    return dict(
        num_experts=experts,
        experts_per_token=chosen,
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        router=router,
        carried=layers_behind(config),
        shared_expert_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
    )


def layers_behind(config: HFConfig) -> tuple[str, ...]:
    """Multi-token prediction, stored as layers behind the last."""
    first = config["num_hidden_layers"]
    number = config.get("num_nextn_predict_layers") or config.get("num_mtp_modules") or 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + number))


# Why a kind of rotary embedding is no function of a token and those before it.
_UNDEFINED = {
    "dynamic": (
        "beyond max_position_embeddings its frequencies depend on the longest sequence so far, so"
        " that the log-probs of a response while it is generated are not those of one pass over it;"
        " set it to default: up to there they are the same"
    ),
}


_YARN_NUMBERS = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
}


def rotary_parameters(config: HFConfig) -> HFConfig:
    """What a config.json says of the rotary embedding, by the keys of ``rope_parameters``, with
    ``rope_type``, ``rope_theta`` and ``partial_rotary_factor``.

    Transformers 5 keeps it in ``rope_parameters``; an older ``rope_scaling`` comes before it, and
    keys beside the two fill in what they leave out. Raises ``ModelError`` for parameters of each
    kind of layer.
    """
    listed = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for key, value in listed.items():
        if isinstance(value, dict):
            problem = f"rope_parameters with {key}={shown(value)} in config.json is not supported"
            raise ModelError(f"{problem}; give the same ones for all layers")
    beside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    parameters = {"rope_type": listed.get("type", "default"), **beside, **listed}
    always = {"rope_theta", "partial_rotary_factor"}
    for key in (always | _YARN_NUMBERS) & parameters.keys():
        # Of YaRN's numbers, Transformers takes null and 0 for absent ones.
        if key in always or listed.get(key) not in (None, 0):
            check_number(key, parameters[key])
    return parameters


def rotated_dims(config: HFConfig, head_dim: int) -> int:
    """How many dimensions of a head are rotated, of a family that may rotate a part."""
    return int(head_dim * rotary_parameters(config).get("partial_rotary_factor", 1.0))


def rotary_of(
    config: HFConfig,
    dim: int,
    *,
    interleaved: bool = False,
    types: tuple[str, ...] = ("default",),
) -> Rotary:
    """The rotary embedding of a config.json, of ``dim`` dimensions.

    types: the values of ``rope_type`` that the family takes, ``default`` and perhaps ``yarn``.
    Raises ``ModelError`` for another one.
    """
    parameters = rotary_parameters({"rope_theta": 10000.0, **config})
    rope_type = parameters["rope_type"]
    problem = f"rope_type={shown(rope_type)} in config.json is not supported"
    if not isinstance(rope_type, str):
        raise ModelError(f"{problem}; known: {', '.join(types)}")
    if rope_type in _UNDEFINED and rope_type not in types:
        raise ModelError(f"{problem}: {_UNDEFINED[rope_type]}")
    if rope_type not in types:
        known = f"only {types[0]!r} is" if len(types) == 1 else f"known: {', '.join(types)}"
        raise ModelError(f"{problem}; {known}")
    base = float(parameters["rope_theta"])
    yarn = _yarn(config, parameters) if rope_type == "yarn" else None
    return Rotary(base, dim, interleaved, yarn)


def _yarn(config: HFConfig, parameters: HFConfig) -> Yarn:
    trained = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    check_number("original_max_position_embeddings", trained)
    if "factor" not in parameters:
        raise ModelError(
            "rope_type='yarn' in config.json has no factor; give how much longer sequences are"
        )
    base = parameters["rope_theta"]
    if base <= 1:
        raise ModelError(
            f"rope_theta={base} in config.json is not supported with yarn; give more than 1"
        )
    factor = parameters["factor"] or config["max_position_embeddings"] / trained
    numerator = parameters.get("mscale")
    denominator = parameters.get("mscale_all_dim")
    cosine = parameters.get("attention_factor")
    if cosine is None:
        cosine = _magnitude(factor, 1.0)
        if numerator and denominator:
            cosine = _magnitude(factor, numerator) / _magnitude(factor, denominator)
    return Yarn(
        factor=factor,
        trained_length=trained,
        fast=parameters.get("beta_fast") or 32.0,
        slow=parameters.get("beta_slow") or 1.0,
        rounds=parameters.get("truncate", True),
        cosine_scale=cosine,
        score_scale=_magnitude(factor, denominator) ** 2 if denominator else 1.0,
    )


def _magnitude(factor: float, weight: float) -> float:
    """What stretched scores are multiplied by: ``0.1 weight ln(factor) + 1``."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
