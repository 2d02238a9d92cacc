"""The sizes of every tensor of a checkpoint, by its name, from the sizes of its model.

They are compared with the headers of the files before a model is built: a config.json that is not
of these weights fails before it takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gspo.models.family import Family
from megatron_gspo.models.model_shape import ModelShape

Sizes = tuple[int, ...]


def tensor_sizes(family: Family, shape: ModelShape) -> Iterator[tuple[str, Sizes]]:
    """Name and sizes of every tensor that a checkpoint of this model holds; of a tensor of all
    experts, its slices.
    """
    hidden = shape.hidden_size
    outer = {
        "embed_tokens": (shape.vocab_size, hidden),
        "norm": (hidden,),
        "lm_head": (shape.vocab_size, hidden),
        "score": (1, hidden),
        "embeddings": (shape.vocab_size, hidden),
        "norm_f": (hidden,),
    }
    for rule in family.outer_rules(shape):
        for name in rule.names():
            yield name, outer[name.removesuffix(".weight").rpartition(".")[2]]
    by_name = (
        _norms(shape)
        | _attention(shape)
        | _latent_attention(shape)
        | _indexer(shape)
        | _delta_net(shape)
        | _mlp(shape)
        | _mamba2(shape)
    )
    for layer in range(shape.num_layers):
        for rule in family.layer_rules(shape, layer):
            for expert in range(shape.num_experts) if rule.is_expert else (0,):
                names = zip(rule.hugging_face, rule.names_in(layer, expert), strict=True)
                yield from ((name, by_name[template]) for template, name in names)


def _norms(shape: ModelShape) -> dict[str, Sizes]:
    return {
        f"{name}.weight": (shape.hidden_size,)
        for name in ("input_layernorm", "post_attention_layernorm")
    }


def _attention(shape: ModelShape) -> dict[str, Sizes]:
    hidden = shape.hidden_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_query_groups * shape.head_dim
    rows = queries * (2 if shape.attention_gate else 1)  # a head's query and its gate
    joint = "joint_norm_attention" in shape.mixers  # a norm over all heads
    return {
        "self_attn.q_proj.weight": (rows, hidden),
        "self_attn.q_proj.bias": (rows,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (queries if joint else shape.head_dim,),
        "self_attn.k_norm.weight": (keys if joint else shape.head_dim,),
        "self_attn.sinks": (shape.num_attention_heads,),
    }


def _latent_attention(shape: ModelShape) -> dict[str, Sizes]:
    if shape.latent is None:
        return {}
    latent = shape.latent
    hidden = shape.hidden_size
    heads = shape.num_attention_heads
    query_rank = latent.query_rank or 0
    return {
        "self_attn.q_proj.weight": (heads * shape.head_dim, hidden),
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (heads * shape.head_dim, query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (latent.key_value_rank + shape.rotary.dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.key_value_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (latent.plain_dim + latent.value_dim),
            latent.key_value_rank,
        ),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }


def _indexer(shape: ModelShape) -> dict[str, Sizes]:
    if shape.indexer is None or shape.latent is None:
        return {}
    sizes = shape.indexer
    return {
        "self_attn.indexer.wq_b.weight": (
            sizes.heads * sizes.head_dim,
            shape.latent.query_rank or 0,
        ),
        "self_attn.indexer.wk.weight": (sizes.head_dim, shape.hidden_size),
        "self_attn.indexer.weights_proj.weight": (sizes.heads, shape.hidden_size),
        "self_attn.indexer.k_norm.weight": (sizes.head_dim,),
        "self_attn.indexer.k_norm.bias": (sizes.head_dim,),
    }


def _delta_net(shape: ModelShape) -> dict[str, Sizes]:
    if shape.delta_net is None:
        return {}
    sizes = shape.delta_net
    hidden = shape.hidden_size
    values = sizes.value_heads * sizes.value_size
    convolved = sizes.key_heads * sizes.convolved
    return {
        "linear_attn.in_proj_qkvz.weight": (convolved + values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * sizes.value_heads, hidden),
        "linear_attn.in_proj_qkv.weight": (convolved, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (sizes.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (sizes.value_heads, hidden),
        "linear_attn.conv1d.weight": (convolved, 1, sizes.kernel),
        "linear_attn.dt_bias": (sizes.value_heads,),
        "linear_attn.A_log": (sizes.value_heads,),
        "linear_attn.norm.weight": (sizes.value_size,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mamba2(shape: ModelShape) -> dict[str, Sizes]:
    """Nemotron-3, where all that a layer may be is its ``mixer``."""
    if shape.mamba is None:
        return {}
    sizes = shape.mamba
    hidden = shape.hidden_size
    convolved = sizes.groups * sizes.convolved
    values = sizes.groups * sizes.values
    in_others = _attention(shape) | _mlp(shape)
    return {
        **{f"mixer.{name.partition('.')[2]}": of_name for name, of_name in in_others.items()},
        "norm.weight": (hidden,),
        "mixer.in_proj.weight": (sizes.groups * sizes.projected, hidden),
        "mixer.conv1d.weight": (convolved, 1, sizes.kernel),
        "mixer.conv1d.bias": (convolved,),
        "mixer.dt_bias": (sizes.heads,),
        "mixer.A_log": (sizes.heads,),
        "mixer.D": (sizes.heads,),
        "mixer.norm.weight": (values,),
        "mixer.out_proj.weight": (hidden, values),
    }


def _mlp(shape: ModelShape) -> dict[str, Sizes]:
    hidden = shape.hidden_size
    width = shape.moe_ffn_hidden_size
    experts = shape.num_experts
    is_transposed = shape.linear_bias  # gpt-oss: an expert's rows are its inputs
    sizes: dict[str, Sizes] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj[{expert}]": (
            (hidden, 2 * width) if is_transposed else (2 * width, hidden)
        ),
        "mlp.experts.gate_up_proj_bias[{expert}]": (2 * width,),
        "mlp.experts.down_proj[{expert}]": (width, hidden) if is_transposed else (hidden, width),
        "mlp.experts.down_proj_bias[{expert}]": (hidden,),
        "mlp.shared_expert_gate.weight": (1, hidden),
        "block_sparse_moe.gate.weight": (experts, hidden),
        "block_sparse_moe.e_score_correction_bias": (experts,),
        "block_sparse_moe.experts.{expert}.w1.weight": (width, hidden),
        "block_sparse_moe.experts.{expert}.w3.weight": (width, hidden),
        "block_sparse_moe.experts.{expert}.w2.weight": (hidden, width),
    }
    for prefix, inner in (
        ("mlp", shape.ffn_hidden_size),
        ("mlp.experts.{expert}", width),
        ("mlp.shared_expert", shape.shared_expert_size),
        ("mlp.shared_experts", shape.shared_expert_size),
    ):
        sizes[f"{prefix}.gate_proj.weight"] = (inner, hidden)
        sizes[f"{prefix}.up_proj.weight"] = (inner, hidden)
        sizes[f"{prefix}.down_proj.weight"] = (hidden, inner)
    return sizes
