"""Bytes that a forward and backward pass keeps on a rank, operation by operation.

Two implementations. ``torch`` counts what the layers of ``mcore/layers.py``, ``mcore/attention.py`` and
``mcore/operators.py`` save for the backward, from their code; on a CPU it is compared with measured peaks
(benchmarks/plan_memory.py). ``transformer_engine`` counts what its modules save, from their documentation and
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4),
adapted to grouped queries, RMSNorm, SwiGLU, flash attention and experts; it is an estimate, not compared with a
measurement.

Symbols as in `layer_sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

from megatron_gspo.config import ParallelConfig
from megatron_gspo.models.model_shape import ModelShape, padded_vocab_size
from megatron_gspo.parallel.log_probs import CHUNK_BYTES
from megatron_gspo.parallel.vocabulary_tiles import TILE, tile_elements, tile_shape
from megatron_gspo.tools.plan import delta_nets, latent_attention
from megatron_gspo.tools.plan.latent_attention import Kept, Latents
from megatron_gspo.tools.plan.layer_sizes import MicroBatch, Setting, Sizes, sizes_of
from megatron_gspo.tools.plan.parameters import LayerKind, chunk_layers, kind_of, layer_kinds
from megatron_gspo.tools.plan.pipeline_schedule import in_flight

INDEX = 8  # int64


def _norm(z: Sizes, elements: float, setting: Setting) -> float:
    """Saved by an RMSNorm in addition to its output: its input, zero-centred norms' in float32. The caller adds one
    number per row. On a CPU torch computes a low-precision norm in float32 steps and saves two of them."""
    if z.wide_norms:
        return elements * max(z.a, 4)
    composed = setting.implementation == "torch" and not setting.on_gpu and z.a < 4
    return elements * (8 if composed else z.a)


def attention_bytes(z: Sizes, setting: Setting) -> dict[str, float]:
    """Saved by one layer of attention up to the residual sum behind it."""
    torch_layers, cpu = setting.implementation == "torch", not setting.on_gpu
    per_row = 4 if z.a < 4 or setting.on_gpu else z.a
    query, key = z.t * z.query * z.d, z.t * z.groups * z.d
    saved = {"norm": _norm(z, z.s * z.h, setting) + per_row * z.s}
    if z.saved_for("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"):
        saved["qkv input"] = z.a * z.s * z.h
    if z.latents is not None:
        return saved | latent_bytes(z, z.latents, setting, per_row)
    if z.qk_norm and z.wide_norms:  # and the product of queries, their gate, keys and values, which the values keep
        kept = _norm(z, query + key, setting) + z.a * ((1 + z.output_gate) * query + 2 * key)
        saved["q and k norms"] = kept + per_row * z.t * (z.query + z.groups)
    elif z.qk_norm:
        # the key's norm, or the value, keeps the whole product of queries, keys and values alive; the query's norm has
        # a copy of its part, unless with one group that is a view; and the key's, if it is over all heads
        if torch_layers and cpu and z.a < 4:
            kept = _norm(z, query + key, setting)
        else:
            kept = z.a * (query + 2 * key + (query if z.groups > 1 else 0.0) + (0.0 if torch_layers else key))
            kept += z.a * key if z.joint_norms and z.groups > 1 else 0.0
        saved["q and k norms"] = kept + per_row * z.t * (2 if z.joint_norms else z.query + z.groups)
    elif not torch_layers or (not cpu and z.keys == z.t):  # the values are a part of this product
        saved["qkv"] = z.a * (query + 2 * key)
    core = z.a * 2 * query + 4 * z.t * z.query  # queries, output, log-sum of a row
    if torch_layers and not cpu and z.keys > z.t:  # gathered keys and values
        core += z.a * 2 * z.keys * z.groups * z.d
    elif torch_layers and cpu:  # keys, values and mask; the output is gathered into a tensor that the projection saves
        core += z.a * (2 * z.keys * z.groups * z.d + query + z.mask)
    else:  # rotated keys; the values lie in the product above; context parallelism passes them on, block by block
        core += z.a * key
    if setting.recompute == "selective":  # the inputs, normalised or as they come; and the projection's
        core = z.a * (query + query * z.saved_for("linear_proj") + (key if z.qk_norm else 0.0))
        if torch_layers and "qkv" not in saved and (not z.qk_norm or (cpu and z.a < 4)):
            core += z.a * (query + 2 * key)  # the values keep the product of qkv alive, which nothing else does
    if z.output_gate:  # its sigmoid in float32, and the product with the output that the projection takes
        core += (max(z.a, 4) + z.a * z.saved_for("linear_proj")) * query
    return saved | {"attention": core}


def latent_bytes(z: Sizes, latents: Latents, setting: Setting, per_row: int) -> dict[str, float]:
    """Saved by latent attention besides the layer's norm and the input of its products."""
    kept = Kept(*map(z.saved_for, ("linear_kv_up_proj", "linear_q_up_proj", "linear_proj")))
    if setting.recompute == "selective":
        core = z.a * latent_attention.recomputed_numbers(latents, z.t, kept)
    else:
        numbers = latent_attention.attention_numbers(latents, z.t, z.keys, on_gpu=setting.on_gpu, kept=kept)
        core = z.a * (numbers + z.mask) + 4 * z.t * z.query  # log-sum of a row
    return {"latents": z.s * latent_attention.latent_bytes(latents, z.a, per_row, kept), "attention": core}


def delta_net_bytes(z: Sizes, setting: Setting) -> dict[str, float]:
    """Saved by one layer of a gated delta net up to the residual sum behind it."""
    assert z.delta_net is not None
    inputs, outputs = z.s * z.h * z.saved_for("in_proj"), z.t * z.delta_net.values * z.saved_for("out_proj")
    rule = delta_nets.saved_bytes(z.delta_net, z.a, keeps_rule=setting.recompute == "full")
    return {"norm": _norm(z, z.s * z.h, setting) + 4 * z.s, "projections": z.a * (inputs + outputs), "delta net": rule}


def mlp_bytes(z: Sizes, setting: Setting) -> dict[str, float]:
    """Saved by a dense MLP with its norm: the input of both products, gate and up projection, and in torch the
    activation and a copy of the up projection."""
    per_row = 4 if z.a < 4 or setting.on_gpu else z.a
    copies = (4 if setting.implementation == "torch" else 2) + z.saved_for("linear_fc2")
    return {
        "mlp norm": _norm(z, z.s * z.h, setting) + per_row * z.s,
        "mlp": z.a * (z.s * z.h * z.saved_for("linear_fc1") + copies * z.t * z.ffn),
    }


def moe_bytes(z: Sizes, setting: Setting) -> dict[str, float]:
    """Saved by an expert layer with its norm: router, permutation and experts."""
    per_row = 4 if z.a < 4 or setting.on_gpu else z.a
    torch_layers = setting.implementation == "torch"
    saved = {"mlp norm": _norm(z, z.s * z.h, setting) + per_row * z.s}
    scores = 4 * (z.router_scores + 1) if z.router_scores else 0  # sigmoids of all experts, and the chosen ones' sum
    saved["router"] = z.s * (z.a * z.h + z.k * (INDEX + 4) + scores)  # input, ids and weights
    width = 2 if torch_layers else 3  # Transformer Engine saves the product of the second too
    saved["experts"] = z.rows * (z.a * (z.h + width * z.moe) + 4)
    if z.shared:
        copies = (4 if torch_layers else 2) + z.saved_for("shared_experts.linear_fc2")
        gated = z.s * z.h if z.shared_gate else 0.0  # its output; its input is the router's
        saved["shared expert"] = z.a * (copies * z.t * z.shared + gated)
    # of a copy its token and expert, its place in the probabilities and among its token's copies; Megatron's own
    # permutation has the order, a mask and all probabilities
    permutation = (4 * z.k + 1) * INDEX if torch_layers else z.k * INDEX + z.experts * (1 + 4)
    return saved | {"permutation": z.s * permutation}


def adapter_bytes(z: Sizes, kind: LayerKind) -> dict[str, float]:
    """Saved by one layer's adapters besides the inputs of their layers: each B, scaled and with the rows of each tensor
    in columns of its own, and of dense ones the product with A, of all tensor-parallel ranks' tokens where it is
    gathered."""
    if z.adapters is None:
        return {}
    matrices = rows = 0.0
    for one in z.adapters[kind]:
        matrices += one.rows * one.width * one.copies
        rows += 0.0 if one.expert else one.width * (z.t if one.gathers else z.s)
    return {"adapters": z.a * (matrices + rows)}


def layer_bytes(z: Sizes, setting: Setting, kind: LayerKind) -> dict[str, float]:
    """All that one layer saves for its backward, without recomputation of the whole layer."""
    mixer = delta_net_bytes if kind.mixer == "gated_delta_net" else attention_bytes
    mlp = moe_bytes if kind.is_moe else mlp_bytes
    return mixer(z, setting) | mlp(z, setting) | adapter_bytes(z, kind)


def backward_bytes(z: Sizes, setting: Setting, kind: LayerKind) -> float:
    """The most that a layer's backward holds above what it has saved, in its MLP or, where the MLP's part is gone, in a
    gated delta net; attention needs less than the MLP."""
    widest = mlp_backward_bytes(z, setting, is_moe=kind.is_moe)
    if kind.mixer != "gated_delta_net":
        return widest
    assert z.delta_net is not None
    above = z.a * z.s * z.h + delta_nets.backward_bytes(z.delta_net, z.a)
    if setting.recompute != "full":
        above += delta_nets.kept_bytes(z.delta_net, z.a)
    mlp = (moe_bytes if kind.is_moe else mlp_bytes)(z, setting)
    return max(widest, above - sum(mlp.values()) - delta_nets.gated_norm_bytes(z.delta_net, z.a))


def mlp_backward_bytes(z: Sizes, setting: Setting, *, is_moe: bool) -> float:
    """The most that a MLP's backward holds above what its layer has saved: gradients of its widest part, in the torch
    experts the gradients of all their weights and on a GPU, where one kernel computes a product of all experts, a copy
    of its weights; with Transformer Engine the gradients of one product. Frozen experts have no gradients of weights;
    their adapters' products are added to the weights'."""
    if not is_moe:
        return z.a * (z.s * z.h + (3 if setting.recompute == "full" else 2) * z.t * z.ffn)
    weights = 3 * z.local * z.moe * z.h
    if z.is_frozen:
        copied = weights * 2 / 3 if setting.on_gpu and z.a == 2 else 0.0
        widest = max(z.rows * (2 * z.h + 4 * z.moe) + copied, z.rows * (3 * z.h + 4 * z.moe),
                     z.rows * (z.h + 6 * z.moe))  # fmt: skip
        return z.a * (z.s * z.h + widest)
    if setting.implementation == "torch":
        copied = weights * 2 / 3 if setting.on_gpu and z.a == 2 else 0.0
        # the gradient of their input, or within the gated unit, where the first product's weights have none yet
        widest = max(z.rows * (2 * z.h + 4 * z.moe) + weights + copied, z.rows * (z.h + z.unit * z.moe) + weights / 3)
        return z.a * (z.s * z.h + widest)
    return z.a * (z.s * z.h + z.rows * (2 * z.h + 3 * z.moe) + weights * 2 / 3)


def dispatch_bytes(z: Sizes) -> float:
    """The most that an expert layer's forward holds above what it saves: the rows as sent and as received, and the
    experts' outputs by expert and by rank. With ETP these are widened to float32, and summed over the ETP ranks."""
    widened, summed = (4 if z.a < 4 else 0, 4) if z.etp > 1 else (0, 0)
    return z.h * z.rows * (2 * z.a + widened + (2 * z.a + summed) / z.etp)


def shared_bytes(z: Sizes, setting: Setting) -> float:
    """Once a micro-batch, for all its layers: the rotary angles and in torch the indices of gathered keys and of padded
    batches."""
    if setting.implementation != "torch":
        return 4 * z.t * z.rotated
    both_ways = 1 if setting.recompute == "none" else 2  # a layer that runs again needs them as the forward did
    gathered = z.keys if z.keys > z.t else 0.0
    padded = 0.0 if setting.on_gpu else both_ways * INDEX * (z.t + gathered)
    return 2 * z.a * z.t * z.rotated + padded + 3 * INDEX * gathered


def gone_bytes(shape: ModelShape, chunks: list[range], kind: LayerKind, saved: Mapping[LayerKind, float]) -> float:
    """What the layers behind the last one of a kind have saved, which is gone in its backward; in the chunk where that
    is least."""
    reverse = [[kind_of(shape, layer) for layer in own[::-1]] for own in chunks]
    return min(sum(saved[behind] for behind in own[: own.index(kind)]) for own in reverse if kind in own)


def embedding_rows(shape: ModelShape, parallel: ParallelConfig) -> int:
    """Rows of the embedding, and of the output weight, on a rank."""
    tp = parallel.tensor_model_parallel_size
    return padded_vocab_size(shape, tp) // tp


def passing(parallel: ParallelConfig, stage: int) -> int:
    """Hidden states and gradients that a stage holds between its passes: the gradient that it sent last; interleaved
    also an input that came early and, on the last stage, the last chunk's last two inputs with their gradients."""
    if parallel.virtual_pipeline_model_parallel_size is None:
        return 1 if stage > 0 else 0
    return 6 if stage == parallel.pipeline_model_parallel_size - 1 else 2


@dataclass(frozen=True)
class Head:
    """Bytes of the log-prob head (``parallel/log_probs.py``). saved: between its forward and its backward; working: the
    most that the backward adds; weight_gradient: of the output weight, part of ``working``; 0 if it is frozen."""

    saved: float
    working: float
    weight_gradient: float


def head_bytes(z: Sizes, shape: ModelShape, parallel: ParallelConfig, setting: Setting) -> Head:
    """Tiles are cut as ``parallel/vocabulary_tiles.py`` cuts them, for entropy-free training."""
    kind = "cuda" if setting.on_gpu else "cpu"
    rows, tokens = embedding_rows(shape, parallel), int(z.scored)
    budget = CHUNK_BYTES[kind] // 4
    tile = tile_shape(tokens, rows, z.h, budget, TILE[kind])
    keeps = tokens * rows + tile_elements(*tile, z.h) <= budget
    converts = z.a < 4 and not setting.on_gpu  # a GPU multiplies bfloat16 into float32 itself
    norm = _norm(z, z.s * z.h, setting) + 4 * z.s
    shares = 4 * tokens * -(-rows // tile[1])  # of every tile of the vocabulary, per token
    saved = norm + z.a * z.s * z.h + z.scored * (INDEX + 40) + shares + (4 * tokens * rows if keeps else 0)
    everyone = 4 * z.scored * z.h if converts else z.a * z.scored * z.h if parallel.use_sequence_parallel else 0
    tiles = 4 * tile[0] * tile[1]
    trains = not z.is_frozen
    if z.a < 4:  # the float32 gradient of a tile of the weight; a CPU converts that tile too
        tiles += 4 * (converts + trains) * tile[1] * z.h
    if z.a < 4 and setting.on_gpu:  # low-precision copy; one tile's product before it is added
        tiles += 2 * tile[0] * tile[1] + 4 * max(tile[0], tile[1] if trains and tokens > tile[0] else 0) * z.h
    gradient = z.a * rows * z.h if trains else 0
    return Head(saved, everyone + tiles + 4 * z.scored * z.h + gradient, gradient)


def peak_bytes(shape: ModelShape, parallel: ParallelConfig, stage: int, batch: MicroBatch, micro_batches: int,
               setting: Setting) -> dict[str, float]:
    """The most that forward and backward hold at once on a rank of a stage, above weights, gradients and optimizer.

    ``saved`` of all layers and micro-batches in flight, ``head`` and ``working`` at the worst of three moments: the
    backward of the head, of the last layer, of the embedding; ``total``.
    """
    z = sizes_of(shape, parallel, batch, setting)
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    layers = [chunk_layers(shape, parallel, stage, chunk) for chunk in range(chunks)]
    kinds = layer_kinds(shape, [layer for chunk in layers for layer in chunk])
    stream, unit = z.a * z.s * z.h, max(min(setting.recompute_num_layers, max(map(len, layers))), 1)
    saved = {kind: sum(layer_bytes(z, setting, kind).values()) for kind in kinds}
    above = {kind: max(backward_bytes(z, setting, kind), dispatch_bytes(z) if kind.is_moe and z.sent else 0.0)
             for kind in kinds}  # fmt: skip
    if setting.recompute == "full" and saved:
        for kind in kinds:
            above[kind] += unit * (saved[kind] - stream) + stream  # what runs again, and its output once more
        saved = dict.fromkeys(saved, stream / unit)
    working = max((above[kind] - gone_bytes(shape, layers, kind, saved) for kind in kinds), default=0.0)
    kept = []
    for chunk, own in enumerate(layers):
        of_layers = sum(saved[kind] * count for kind, count in layer_kinds(shape, own).items())
        is_sent = stages > 1 and not (stage == stages - 1 and chunk == chunks - 1)
        freed = setting.on_gpu and chunks == 1  # outputs, as soon as they are sent
        kept.append(of_layers + (shared_bytes(z, setting) if own else 0.0) + (stream if is_sent and not freed else 0.0))
    held = max(sum(map(mul, counts, kept)) for counts in in_flight(parallel, stage, micro_batches))
    held += stream * passing(parallel, stage)
    if parallel.use_sequence_parallel and not z.is_frozen:
        held += z.a * z.t * z.h  # Megatron's buffer for gathered tokens, of gradients of weights
    moments = {"layer": (0.0, working)}
    tied_here = shape.tied_embeddings and stages == 1
    if stage == stages - 1:
        head = head_bytes(z, shape, parallel, setting)
        moments["head"] = (head.saved, head.working)
        if tied_here:  # its gradient waits for the embedding's
            moments["layer"] = (0.0, working + head.weight_gradient)
    worst = max(moments, key=lambda name: sum(moments[name]))
    found = {"saved": held, "head": moments[worst][0], "working": moments[worst][1]}
    table = z.a * z.h * embedding_rows(shape, parallel)
    least = (2 if tied_here else 1) * table if stage == 0 and not z.is_frozen else 0.0  # its gradient
    if least > sum(found.values()):
        found = {"saved": 0.0, "head": 0.0, "working": least}
    return found | {"total": sum(found.values())}
