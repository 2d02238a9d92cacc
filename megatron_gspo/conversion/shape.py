"""What a model is, read from a Hugging Face ``config.json`` as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer; ``moe_layers[i]`` says whether layer ``i`` has experts."""

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
    moe_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    normalize_topk: bool = True

    @property
    def is_moe(self) -> bool:
        return any(self.moe_layers)


def read_config(path: str | Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face model directory, as a dict.

    Raises ``FileNotFoundError`` or ``ValueError`` with one line that names the file.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"model.path={path}: no config.json there; give a Hugging Face model directory")
    try:
        return dict(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None


def rope_theta(config: dict[str, Any]) -> float:
    """The rotary base; Transformers 5 keeps it in ``rope_parameters``. Scaled rotary embeddings are refused."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type={kind!r} in config.json is not supported; only 'default' is")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
