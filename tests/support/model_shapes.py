"""Models that the tests of the plan share."""

from pathlib import Path

from megatron_gspo.models import ModelShape, family_of, read_config
from megatron_gspo.models.rotary import Rotary

FOLDER = Path(__file__).parents[2] / "examples"
SMALL, LARGE = (
    FOLDER / "qwen3_moe" / "models" / name for name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
)
NEXT = FOLDER / "qwen3_next" / "models" / "Qwen3-Next-80B-A3B"
MINIMAX_M2 = FOLDER / "minimax_m2" / "models" / "MiniMax-M2"


def shape_of(path: Path) -> ModelShape:
    return family_of(read_config(path))[1]


def dense_shape(**changes: object) -> ModelShape:
    """Hidden 8, 2 heads and 1 key-value head of 4, MLP of 6, 10 words, 2 layers."""
    sizes = dict(
        model_type="qwen3",
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=1,
        head_dim=4,
        ffn_hidden_size=6,
        vocab_size=10,
        rms_norm_eps=1e-6,
        rotary=Rotary(1e4, 4),
        max_position_embeddings=64,
        tied_embeddings=False,
        moe_layers=(False, False),
    )
    return ModelShape(**{**sizes, **changes})  # type: ignore[arg-type]
