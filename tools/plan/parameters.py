"""The parameters that a rank holds, one by one, in the order in which Megatron registers them.

Sizes are counts of elements. The sources are Megatron-Core's layer modules (``ColumnParallelLinear`` and
``RowParallelLinear`` cut rows and columns over TP, norms and routers are whole on every TP rank, experts are cut over
EP and each over ETP) and the layer specs of ``mcore/layers.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape, padded_vocab_size


@dataclass(frozen=True)
class Parameter:
    """One tensor of a rank: its elements, whether it is an expert's, and whether it is a tied embedding that another
    pipeline stage holds too (Megatron's ``shared_embedding``, which gets a bucket of its own). columns: of the weight
    of a linear layer, 0 for others."""

    name: str
    count: int
    expert: bool = False
    shared: bool = False
    columns: int = 0


class LayerKind(NamedTuple):
    """What a layer's sizes depend on: its mixer, as in ``ModelShape.mixers``, and whether it has experts."""

    mixer: str
    is_moe: bool


def kind_of(shape: ModelShape, layer: int) -> LayerKind:
    return LayerKind(shape.mixers[layer], shape.moe_layers[layer])


def _linear(name: str, rows: int, columns: int, *, expert: bool = False) -> Parameter:
    return Parameter(name, rows * columns, expert, columns=columns)


def layer_parameters(shape: ModelShape, parallel: ParallelConfig, kind: LayerKind) -> tuple[Parameter, ...]:
    """The parameters of one transformer layer on one rank."""
    return _layer_parameters(shape, *_sizes(parallel), kind)


def _sizes(parallel: ParallelConfig) -> tuple[int, int, int]:
    """TP, EP, ETP: what a layer's tensors depend on."""
    return parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size


def _attention(shape: ModelShape, tp: int) -> list[Parameter]:
    h, d = shape.hidden_size, shape.head_dim
    query = shape.num_attention_heads * d
    rows = (1 + shape.attention_gate) * query + 2 * shape.num_query_groups * d
    found: list[Parameter] = []
    if "sink_attention" in shape.mixers:
        found.append(Parameter("softmax_offset", shape.num_attention_heads // tp))
    found.append(_linear("linear_proj", h, query // tp))
    if shape.linear_bias:
        found.append(Parameter("linear_proj.bias", h))
    found.append(_linear("linear_qkv", rows // tp, h))
    if shape.attention_bias:
        found.append(Parameter("linear_qkv.bias", rows // tp))
    if shape.query_key_norms:
        joint = "joint_norm_attention" in shape.mixers  # of all heads of the rank
        heads = (query // tp, shape.num_query_groups * d // tp) if joint else (d, d)
        found += [Parameter("q_layernorm", heads[0]), Parameter("k_layernorm", heads[1])]
    return found


def _latent_attention(shape: ModelShape, tp: int) -> list[Parameter]:
    sizes, h, heads = shape.latent, shape.hidden_size, shape.num_attention_heads // tp
    assert sizes is not None
    query = heads * (sizes.plain_dim + shape.rotary.dim)
    if sizes.query_rank is None:
        found = [_linear("linear_q_proj", query, h)]
    else:
        found = [
            _linear("linear_q_down_proj", sizes.query_rank, h),
            Parameter("q_layernorm", sizes.query_rank),
            _linear("linear_q_up_proj", query, sizes.query_rank),
        ]
    return [
        *found,
        _linear("linear_kv_down_proj", sizes.key_value_rank + shape.rotary.dim, h),
        Parameter("kv_layernorm", sizes.key_value_rank),
        _linear("linear_kv_up_proj", heads * (sizes.plain_dim + sizes.value_dim), sizes.key_value_rank),
        _linear("linear_proj", h, heads * sizes.value_dim),
    ]


def _gated_delta_net(shape: ModelShape, tp: int) -> list[Parameter]:
    sizes, h = shape.delta_net, shape.hidden_size
    assert sizes is not None
    heads, values = sizes.key_heads // tp, sizes.value_heads // tp
    return [
        Parameter("dt_bias", values),
        Parameter("A_log", values),
        _linear("in_proj", heads * sizes.projected, h),
        Parameter("conv1d", heads * sizes.convolved * sizes.kernel),
        Parameter("out_norm", sizes.value_size),
        _linear("out_proj", h, values * sizes.value_size),
    ]


# The parameters of a layer's mixer, by its kind in ``ModelShape.mixers``.
_MIXERS = {
    "attention": _attention,
    "windowed_attention": _attention,
    "sink_attention": _attention,
    "joint_norm_attention": _attention,
    "latent_attention": _latent_attention,
    "gated_delta_net": _gated_delta_net,
}


def attention_dim(shape: ModelShape) -> int:
    """Of a head, the mean of its queries' and its values' dimensions: of the products of a score and of its value."""
    return shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) // 2


@cache
def _layer_parameters(shape: ModelShape, tp: int, ep: int, etp: int, kind: LayerKind) -> tuple[Parameter, ...]:
    h = shape.hidden_size
    found = [Parameter("input_layernorm", h), *_MIXERS[kind.mixer](shape, tp), Parameter("pre_mlp_layernorm", h)]
    if not kind.is_moe:
        width = shape.ffn_hidden_size // tp
        return (*found, _linear("linear_fc1", 2 * width, h), _linear("linear_fc2", h, width))
    width = shape.moe_ffn_hidden_size // etp
    found.append(_linear("router", shape.num_experts, h))
    if shape.linear_bias:
        found.append(Parameter("router.bias", shape.num_experts))
    for index in range(shape.num_experts // ep):
        for name, rows, columns in (("linear_fc1", 2 * width, h), ("linear_fc2", h, width)):
            found.append(_linear(f"experts.{index}.{name}", rows, columns, expert=True))
            if shape.linear_bias:
                found.append(Parameter(f"experts.{index}.{name}.bias", rows, expert=True))
    if shape.shared_expert_size:
        width = shape.shared_expert_size // tp
        if shape.shared_expert_gate:
            found.append(Parameter("shared_experts.gate", h))
        found.append(_linear("shared_experts.linear_fc1", 2 * width, h))
        found.append(_linear("shared_experts.linear_fc2", h, width))
    return tuple(found)


@cache
def _layer_counts(shape: ModelShape, tp: int, ep: int, etp: int, kind: LayerKind) -> tuple[Counter[int], Counter[int]]:
    return counts_by_size(_layer_parameters(shape, tp, ep, etp, kind))


def counts_by_size(parts: Sequence[Parameter]) -> tuple[Counter[int], Counter[int]]:
    """How many of the tensors have each size: dense ones, experts'."""
    return Counter(part.count for part in parts if not part.expert), Counter(p.count for p in parts if p.expert)


def layer_counts(shape: ModelShape, parallel: ParallelConfig, kind: LayerKind) -> tuple[Counter[int], Counter[int]]:
    """How many tensors of each size a layer has on a rank: dense ones, experts'."""
    return _layer_counts(shape, *_sizes(parallel), kind)


def local_experts(shape: ModelShape, parallel: ParallelConfig) -> int:
    """Experts of a layer that a rank holds (a part of each, with ETP)."""
    return shape.num_experts // parallel.expert_model_parallel_size


def chunk_layers(shape: ModelShape, parallel: ParallelConfig, stage: int, chunk: int = 0) -> range:
    """The layers of a model chunk of a pipeline stage: chunk c of stage s holds the (c PP + s)-th part of the model,
    in which the embedding stands before the first layer and the loss after the last where they count as layers."""
    parts = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    size = (shape.num_layers + parallel.extra_pipeline_layers) // parts
    part = chunk * parallel.pipeline_model_parallel_size + stage
    first = part * size - parallel.account_for_embedding_in_pipeline_split
    return range(max(first, 0), min(first + size, shape.num_layers))


def stage_layers(shape: ModelShape, parallel: ParallelConfig, stage: int) -> list[int]:
    """All layers of a pipeline stage, over its chunks."""
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return [layer for chunk in range(chunks) for layer in chunk_layers(shape, parallel, stage, chunk)]


def outer_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int, chunk: int
                     ) -> tuple[list[Parameter], list[Parameter]]:
    """What a chunk holds before and after its layers: the embedding; the last norm and the output weight, or a value
    model's head.

    With tied embeddings the last stage has a copy of its own where the pipeline has several stages, else none.
    """
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    tp = parallel.tensor_model_parallel_size
    rows = padded_vocab_size(shape, tp) // tp * shape.hidden_size
    shared = shape.tied_embeddings and stages > 1
    before = [Parameter("word_embeddings", rows, shared=shared)] if stage == 0 and chunk == 0 else []
    if stage != stages - 1 or chunk != chunks - 1:
        return before, []
    after = [Parameter("final_layernorm", shape.hidden_size)]
    if shape.value_head:
        after.append(Parameter("value_head", shape.hidden_size))
    elif not shape.tied_embeddings or stages > 1:
        after.append(Parameter("output_layer", rows, shared=shared))
    return before, after


def chunk_parameters(shape: ModelShape, parallel: ParallelConfig, stage: int, chunk: int = 0) -> Iterator[Parameter]:
    """Every parameter of a model chunk on a rank of ``stage``, in Megatron's order."""
    before, after = outer_parameters(shape, parallel, stage, chunk)
    yield from before
    for layer in chunk_layers(shape, parallel, stage, chunk):
        yield from layer_parameters(shape, parallel, kind_of(shape, layer))
    yield from after


def layer_kinds(shape: ModelShape, layers: list[int] | range) -> Counter[LayerKind]:
    """How many of the layers are of each kind."""
    return Counter(kind_of(shape, layer) for layer in layers)


@cache
def total_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model, without padding."""
    return _parameters(shape, shape.num_experts)


@cache
def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token uses: all but the experts that it isn't routed to."""
    return _parameters(shape, shape.experts_per_token)


def _parameters(shape: ModelShape, experts: int) -> int:
    whole = ParallelConfig()
    outer = (1 if shape.tied_embeddings else 2) * shape.vocab_size * shape.hidden_size + shape.hidden_size
    total = outer
    for kind, layers in layer_kinds(shape, range(shape.num_layers)).items():
        parts = layer_parameters(shape, whole, kind)
        dense = sum(part.count for part in parts if not part.expert)
        one = sum(part.count for part in parts if part.expert) // max(shape.num_experts, 1)
        total += layers * (dense + (one * experts if kind.is_moe else 0))
    return total
