"""What a model is, read from a Hugging Face ``config.json`` as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gspo.errors import ModelError, first_line
from megatron_gspo.models.config_defaults import HFConfig, shown, with_defaults
from megatron_gspo.models.rotary import Rotary

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
    "n_routed_experts",
    "n_group",
    "topk_group",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "index_n_heads",
    "index_topk",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "moe_shared_expert_intermediate_size",
    "rotary_dim",
    "decoder_sparse_step",
    "full_attention_interval",
)
_COUNTS = (  # may be 0
    "first_k_dense_replace",
    "max_window_layers",
    "n_shared_experts",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "shared_expert_intermediate_size",
)
# No model is larger. Beyond, memory would be full before a weight's size is compared with its
# file's.
_LARGEST = {"max_position_embeddings": 1 << 30, "num_hidden_layers": 1 << 12}
_LARGEST_SIZE = 1 << 22
_MOST_EXPERTS = 1 << 18  # of all layers together
_MOST_JSON_BYTES = 64 << 20  # the largest published index has 20 MB


@dataclass(frozen=True)
class Router:
    """How the tokens of a layer choose among its experts."""

    score: str = "softmax"
    """Score of an expert: ``softmax`` or ``sigmoid`` of the logits."""

    normalize: bool = True
    """Whether the weights of the chosen experts sum to 1, before ``scaling``."""

    scaling: float = 1.0
    """Factor on the weights of the chosen experts."""

    expert_bias: bool = False
    """Whether a bias in float32 is added to the scores by which experts are chosen, not to their
    weights."""

    groups: int = 1
    """Number of groups that the experts of a layer are divided into."""

    chosen_groups: int = 1
    """Experts are chosen from so many groups, those with the largest sums of two scores."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention."""

    query_rank: int | None
    """Rank of the latent of the queries; None: queries come from the hidden state."""

    key_value_rank: int
    """Rank of the latent of keys and values."""

    plain_dim: int
    """Dimensions of queries and keys of a head without position."""

    value_dim: int
    """Dimensions of the values of a head."""

    norm_eps: float = 1e-6
    """Epsilon of the latents' norms."""


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of the indexer that selects the positions which a query attends."""

    heads: int
    head_dim: int
    """Dimensions of a head, of which the first ``ModelShape.rotary.dim`` are rotated."""

    topk: int
    """Positions that a query attends; all up to its own where these are no more."""

    interleaved: bool
    """Whether its rotated pairs are neighbours, as in ``Rotary``."""

    norm_eps: float = 1e-6
    """Epsilon of the norm of its keys."""


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a gated delta net."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``."""

    key_size: int
    """Dimensions of a key head."""

    value_size: int
    """Dimensions of a value head."""

    kernel: int
    """Tokens of the convolution."""

    @property
    def values_per_key(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    @property
    def convolved(self) -> int:
        """Channels of a key head that the convolution reads: its query and key, and the values."""
        return 2 * self.key_size + self.values_per_key * self.value_size

    @property
    def exchanged(self) -> int:
        """Channels of a key head that the delta rule reads: the convolved ones, beta and decay."""
        return self.convolved + 2 * self.values_per_key

    @property
    def projected(self) -> int:
        """Channels of a key head that the projection makes: the exchanged ones and the output's
        gate.
        """
        return self.exchanged + self.values_per_key * self.value_size


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a Mamba-2 layer."""

    heads: int
    """A multiple of ``groups``."""

    head_size: int
    """Dimensions of a head."""

    groups: int
    """Groups of heads that share what they write to their states and read them by."""

    state_size: int
    """Dimensions of what they share, twice."""

    kernel: int
    """Tokens of the convolution."""

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def values(self) -> int:
        """Channels of a group's heads."""
        return self.heads_per_group * self.head_size

    @property
    def convolved(self) -> int:
        """Channels of a group that the convolution reads: its heads', B and C."""
        return self.values + 2 * self.state_size

    @property
    def exchanged(self) -> int:
        """Channels of a group that the recurrence reads: the convolved ones and the time steps."""
        return self.convolved + self.heads_per_group

    @property
    def projected(self) -> int:
        """Channels of a group that the projection makes: the exchanged ones and the output's gate."""
        return self.exchanged + self.values


NO_MIXER = "none"
"""In ``ModelShape.mixers``: nothing mixes the tokens of the layer."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and layer facts of a decoder-only transformer: all that tells its family from another,
    as data."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    rotary: Rotary
    max_position_embeddings: int
    tied_embeddings: bool
    mixers: tuple[str, ...] = ()
    """What mixes the tokens of each layer, a key of ``MIXERS`` in ``mcore/mixers.py``; by default
    attention everywhere."""

    windows: tuple[int | None, ...] = ()
    """How many keys a query attends in each layer, its own the last; None: all before it."""

    attention_bias: bool = False
    """Whether query, key and value have biases."""

    linear_bias: bool = False
    """Whether attention's output, router and experts have biases."""

    glu_limit: float | None = None
    """Limit of the experts' clamped gated unit (``mcore/gated_units.py``); None: it is SwiGLU."""

    query_key_norms: bool = True
    moe_layers: tuple[bool, ...] = ()
    """Whether each layer has experts."""

    mlp_layers: tuple[bool, ...] = ()
    """Whether each layer has an MLP or experts; by default all have."""

    squared_relu: bool = False
    """Whether MLPs and experts are the squared ReLU of one projection, without a gate."""

    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    router: Router = Router()
    shared_expert_size: int = 0
    """Width of the expert that every token goes to; 0: there is none."""

    shared_expert_gate: bool = False
    """Whether that expert has a gate of its own."""

    latent: LatentSizes | None = None
    """Sizes of the mixers ``latent_attention`` and ``sparse_latent_attention``."""

    indexer: IndexerSizes | None = None
    """Sizes of the mixer ``sparse_latent_attention`` besides."""

    carried: tuple[str, ...] = ()
    """Starts of the names of tensors in the checkpoint that are not trained."""

    delta_net: DeltaNetSizes | None = None
    """Sizes of the mixer ``gated_delta_net``."""

    mamba: Mamba2Sizes | None = None
    """Sizes of the mixer ``mamba2``."""

    attention_gate: bool = False
    """Whether the output of attention is multiplied by a sigmoid of the layer's input."""

    zero_centred_norms: bool = False
    """Whether a norm multiplies by 1 + weight."""

    value_head: bool = False
    """Whether the output is one value a position (PPO's value model)."""

    def __post_init__(self) -> None:
        if not self.mixers:
            object.__setattr__(self, "mixers", ("attention",) * self.num_layers)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if not self.mlp_layers:
            object.__setattr__(self, "mlp_layers", (True,) * self.num_layers)

    @property
    def is_moe(self) -> bool:
        return any(self.moe_layers)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or an expert: up, down and perhaps gate."""
        return 2 if self.squared_relu else 3

    @property
    def selected_positions(self) -> int:
        """Positions that a query of sparse attention attends; 0 without an indexer."""
        return self.indexer.topk if self.indexer else 0


def padded_vocab_size(shape: ModelShape, tensor_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel
    size.
    """
    return -(-shape.vocab_size // tensor_size) * tensor_size


def read_config(path: str | Path) -> HFConfig:
    """``config.json`` of a Hugging Face model directory, as a dict: `language_config` of it.

    Raises ``ModelError`` with one line that names the file.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(
            f"model.path={path}: no config.json there; give a Hugging Face model directory"
        )
    return language_config(read_json(file))


def language_config(config: HFConfig) -> HFConfig:
    """A ``config.json`` with the keys of its language model, those that it leaves out included
    (`with_defaults`).

    Models that read images too keep their language model's keys in ``text_config``; the others stay
    beside them. ``model_type`` stays the whole model's. Raises ``ModelError`` where the two
    disagree on tied embeddings, and for a value that a key can't have.
    """
    model_type = config.get("model_type")
    text = config.get("text_config")
    if not isinstance(text, dict):
        return with_defaults(model_type, config)
    tied = config.get("tie_word_embeddings")
    if tied is not None and text.get("tie_word_embeddings", tied) != tied:
        raise ModelError(
            f"tie_word_embeddings={tied} in config.json and {not tied} in its text_config"
        )
    inner = {} if tied is None else {"tie_word_embeddings": tied}
    return {
        **config,
        **with_defaults(model_type, inner | text, is_text_config=True),
        "model_type": model_type,
    }


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; ``ModelError`` naming the file for anything else, also for a key
    with two values.
    """
    try:
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError(f"more than {_MOST_JSON_BYTES >> 20} MiB")
        content = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=_with_each_key_once
        )
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{file}: not valid JSON ({first_line(error)}); download it again"
        ) from None
    except RecursionError:
        raise ModelError(
            f"{file}: not valid JSON (too many brackets inside each other); download it again"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{file}: not valid JSON (a {type(content).__name__}, no object); download it again"
        )
    return content


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        for key, value in pairs:
            if value != content[key]:
                raise ValueError(f"{key} has two values")
    return content


def experts_of(config: Mapping[str, Any]) -> int | None:
    """Experts of a layer in a ``config.json``, whose key differs by family; None in a dense
    model's.
    """
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[key] for key in keys if config.get(key)), None)


def layers_of(config: Mapping[str, Any]) -> int | None:
    """Layers of a ``config.json``, some of which have only the kind of each."""
    if (number := config.get("num_hidden_layers")) is not None:
        return number
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    return next((len(config[key]) for key in keys if config.get(key)), None)


def check_sizes(config: HFConfig) -> None:
    """Sizes in a ``config.json`` are integers above 0 that a model can have, where present;
    else ``ModelError``.
    """
    for key in (*_SIZES, *_COUNTS):
        value = config.get(key)
        least = 0 if key in _COUNTS else 1
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            fix = "give an integer above 0" if least else "give an integer from 0"
            raise ModelError(f"{key}={shown(value)} in config.json is not a size; {fix}")
        largest = _LARGEST.get(key, _LARGEST_SIZE)
        if value > largest:
            raise ModelError(
                f"{key}={shown(value)} in config.json is no model's size; give at most {largest}"
            )
    chosen = config.get("num_experts_per_tok")
    experts = experts_of(config)
    if experts and (layers := config.get("num_hidden_layers")) and experts * layers > _MOST_EXPERTS:
        raise ModelError(
            f"config.json has {experts} experts in each of {layers} layers; no model has so many"
        )
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise ModelError(
            f"num_attention_heads={heads} in config.json is no multiple of"
            f" num_key_value_heads={groups}"
        )
    if chosen and experts and chosen > experts:
        raise ModelError(
            f"num_experts_per_tok={chosen} in config.json is more than the {experts} experts;"
            " lower it"
        )
    if chosen == 1 and config.get("norm_topk_prob"):
        raise ModelError(
            "num_experts_per_tok=1 with norm_topk_prob=true in config.json makes every weight of an"
            " expert 1, so that no router could learn; set norm_topk_prob to false"
        )
