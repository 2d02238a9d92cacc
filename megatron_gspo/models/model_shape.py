"""What a model is, read from a Hugging Face ``config.json`` as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gspo.errors import InputError

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


class ModelError(InputError):
    """A Hugging Face model directory that can't be used; one line naming the file, key or tensor."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer; ``moe_layers[i]``: whether layer ``i`` has experts.

    ``attention_bias``: of query, key and value. ``shared_expert_size``: width of the expert that every token goes to,
    with a gate of its own; 0: there is none. ``value_head``: the output is one value a position (PPO's value model).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied_embeddings: bool
    attention_bias: bool = False
    query_key_norms: bool = True
    moe_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    normalize_topk: bool = True
    shared_expert_size: int = 0
    value_head: bool = False

    @property
    def is_moe(self) -> bool:
        return any(self.moe_layers)


def padded_vocab_size(shape: ModelShape, tensor_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-shape.vocab_size // tensor_size) * tensor_size


def read_config(path: str | Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face model directory, as a dict.

    Raises ``ModelError`` with one line that names the file.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(f"model.path={path}: no config.json there; give a Hugging Face model directory")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; ``ModelError`` naming the file for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file}: not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: not valid JSON (a {type(content).__name__}, no object); download it again")
    return content


def check_sizes(config: dict[str, Any]) -> None:
    """Sizes in a ``config.json`` are integers above 0 where present; else ``ModelError``."""
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(f"{key}={value!r} in config.json is not a size; give an integer above 0")
    chosen, experts = config.get("num_experts_per_tok"), config.get("num_experts") or config.get("num_local_experts")
    if chosen and experts and chosen > experts:
        raise ModelError(f"num_experts_per_tok={chosen} in config.json is more than the {experts} experts; lower it")
    if chosen == 1 and config.get("norm_topk_prob"):
        raise ModelError(
            "num_experts_per_tok=1 with norm_topk_prob=true in config.json makes every weight of an expert 1, so that "
            "no router could learn; set norm_topk_prob to false"
        )


def rope_theta(config: dict[str, Any]) -> float:
    """The rotary base; Transformers 5 keeps it in ``rope_parameters``. Scaled rotary embeddings are refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ModelError(f"rope_type={kind!r} in config.json is not supported; only 'default' is")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
