"""What published models have: the full config.json, and the tensor names of the files of those that
a table lists.

Data, no weights: ``{a..b}`` stands for each number from a to b, ``{x,y}`` for each of the two.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
_BRACES = re.compile(r"\{([^{}]*)\}")


def expanded(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for."""
    parts = _BRACES.split(pattern)
    choices = [[text] if index % 2 == 0 else _choices(text) for index, text in enumerate(parts)]
    return ("".join(each) for each in itertools.product(*choices))


def _choices(text: str) -> list[str]:
    if ".." in text:
        first, last = text.split("..")
        return [str(number) for number in range(int(first), int(last) + 1)]
    return text.split(",")


def example(path: str) -> dict[str, Any]:
    """The config.json of a model of `examples/`."""
    family, model = path.split("/")
    return json.loads(
        (EXAMPLES / family / "models" / model / "config.json").read_text(encoding="utf-8")
    )


_OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_NORMS = "{input_layernorm,post_attention_layernorm}.weight"
_MLP = "{gate_proj,up_proj,down_proj}"


def _layers(
    last: int, *names: str, first: int = 0, prefix: str = "model.layers"
) -> tuple[str, ...]:
    return tuple(f"{prefix}.{{{first}..{last}}}.{name}" for name in names)


def _qwen3_moe(last: int, experts: int) -> tuple[str, ...]:
    return _OUTER + _layers(
        last,
        _NORMS,
        "self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
        "mlp.gate.weight",
        f"mlp.experts.{{0..{experts}}}.{_MLP}.weight",
    )


def _latent(
    last: int,
    dense: int,
    experts: int,
    *,
    queries: str,
    ends: str,
    routed: str = "",
    more: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """DeepSeek-V3 and after it: ``ends`` of the linear layers, a weight and perhaps scales;
    ``routed``: those of the routed experts, if they are others."""
    mixer = (
        _NORMS,
        f"self_attn.{{{queries},kv_a_proj_with_mqa,kv_b_proj,o_proj}}.{ends}",
        "self_attn.kv_a_layernorm.weight",
        *(("self_attn.q_a_layernorm.weight",) if "q_a_proj" in queries else ()),
        *more,
    )
    return (
        *_layers(last, *mixer),
        *_layers(dense - 1, f"mlp.{_MLP}.{ends}"),
        *_layers(last, *_sigmoid_experts(experts, ends, routed or ends), first=dense),
    )


def _sigmoid_experts(experts: int, ends: str, routed: str) -> tuple[str, ...]:
    return (
        "mlp.gate.{weight,e_score_correction_bias}",
        f"mlp.experts.{{0..{experts}}}.{_MLP}.{routed}",
        f"mlp.shared_experts.{_MLP}.{ends}",
    )


_MTP = ("{enorm,hnorm,eh_proj}.weight", "shared_head.norm.weight")
_MTP_VOCABULARY = ("embed_tokens.weight", "shared_head.head.weight")
_FP8 = "{weight,weight_scale_inv}"
_INT4 = "{weight_packed,weight_scale,weight_shape}"
_Q_LATENT = "q_a_proj,q_b_proj"
_INDEXER = ("self_attn.indexer.weights_proj.weight", "self_attn.indexer.k_norm.{weight,bias}")
_INV_FREQ = ("self_attn.rotary_emb.inv_freq",)


def _glm4_moe(last: int, dense: int, experts: int, norms: str = "") -> tuple[str, ...]:
    return (
        *_OUTER,
        *_layers(
            last + 1,
            _NORMS,
            "self_attn.{q_proj,k_proj,v_proj}.{weight,bias}",
            f"self_attn.{{o_proj{norms}}}.weight",
        ),
        *_layers(dense - 1, f"mlp.{_MLP}.weight"),
        *_layers(last + 1, *_sigmoid_experts(experts, "weight", "weight"), first=dense),
        *_layers(last + 1, *_MTP, *_MTP_VOCABULARY, first=last + 1),
    )


def _delta_net(layers: int, prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Every fourth layer has attention."""
    linear = [layer for layer in range(layers) if (layer + 1) % 4]
    full = [layer for layer in range(layers) if (layer + 1) % 4 == 0]
    return tuple(
        f"{prefix}.{{{','.join(map(str, numbers))}}}.{name}"
        for numbers, of_mixer in (
            (linear, names),
            (full, ("self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",)),
        )
        for name in of_mixer
    )


_NEXT_MIXER = (
    "linear_attn.{in_proj_qkvz,in_proj_ba,conv1d,norm,out_proj}.weight",
    "linear_attn.{A_log,dt_bias}",
)
_QWEN35_MIXER = (
    "linear_attn.{in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,conv1d,norm,out_proj}.weight",
    "linear_attn.{A_log,dt_bias}",
)
_SHARED = (f"mlp.shared_expert.{_MLP}.weight", "mlp.shared_expert_gate.weight")


def _qwen2_moe(last: int, experts: int) -> tuple[str, ...]:
    return _OUTER + _layers(
        last,
        _NORMS,
        "self_attn.{q_proj,k_proj,v_proj}.{weight,bias}",
        "self_attn.o_proj.weight",
        "mlp.gate.weight",
        f"mlp.experts.{{0..{experts}}}.{_MLP}.weight",
        *_SHARED,
    )


_MTP_MODULE = (
    "mtp.{fc,norm,pre_fc_norm_embedding,pre_fc_norm_hidden}.weight",
    "mtp.layers.0.{input_layernorm,post_attention_layernorm}.weight",
    "mtp.layers.0.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
)
_VISION = (
    "model.visual.patch_embed.proj.{weight,bias}",
    "model.visual.pos_embed.weight",
    "model.visual.blocks.{0..26}.{norm1,norm2,attn.qkv,attn.proj,mlp.linear_fc1,mlp.linear_fc2}.{weight,bias}",
    "model.visual.merger.{norm,linear_fc1,linear_fc2}.{weight,bias}",
)
_MOON_VISION = (
    "vision_tower.encoder.blocks.{0..26}.{norm0,norm1,wqkv,wo,mlp.fc0,mlp.fc1}.{weight,bias}",
    "vision_tower.{encoder.final_layernorm,patch_embed.proj}.{weight,bias}",
    "vision_tower.patch_embed.pos_emb.weight",
    "mm_projector.{pre_norm,proj.0,proj.2}.{weight,bias}",
)
_TEXT = "model.language_model.layers"
_TEXT_OUTER = (
    "model.language_model.embed_tokens.weight",
    "model.language_model.norm.weight",
    "lm_head.weight",
)

_NEMOTRON = example("nemotron_h/Nemotron-3-Nano-30B-A3B") | dict(
    auto_map={
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    transformers_version="4.55.4",
)


def _nemotron(pattern: str, experts: int) -> tuple[str, ...]:
    names_of_letter = {
        "M": (
            "mixer.{in_proj,norm,out_proj}.weight",
            "mixer.conv1d.{weight,bias}",
            "mixer.{dt_bias,A_log,D}",
        ),
        "*": ("mixer.{q_proj,k_proj,v_proj,o_proj}.weight",),
        "E": (
            "mixer.gate.{weight,e_score_correction_bias}",
            f"mixer.experts.{{0..{experts}}}.{{up_proj,down_proj}}.weight",
            "mixer.shared_experts.{up_proj,down_proj}.weight",
        ),
    }
    return (
        *(f"backbone.{name}.weight" for name in ("embeddings", "norm_f")),
        "lm_head.weight",
        *(
            f"backbone.layers.{layer}.{name}"
            for layer, letter in enumerate(pattern)
            for name in ("norm.weight", *names_of_letter[letter])
        ),
    )


NAMES: dict[str, tuple[str, ...]] = {
    "Qwen3-30B-A3B": _qwen3_moe(47, 127),
    "Qwen3-235B-A22B": _qwen3_moe(93, 127),
    "Qwen3-Coder-30B-A3B": _qwen3_moe(47, 127),
    "Qwen3-Coder-480B-A35B": _qwen3_moe(61, 159),
    "Qwen3-1.7B": (
        *_OUTER,  # with the embedding once more
        *_layers(
            27,
            _NORMS,
            "self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
            f"mlp.{_MLP}.weight",
        ),
    ),
    "Qwen3-4B": (
        *_OUTER[:2],
        *_layers(
            35,
            _NORMS,
            "self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
            f"mlp.{_MLP}.weight",
        ),
    ),
    "Qwen2-57B-A14B": _qwen2_moe(27, 63),
    "Qwen1.5-MoE-A2.7B": _qwen2_moe(23, 59),
    "Qwen3-Next-80B-A3B": (
        *_OUTER,
        *_layers(47, _NORMS, "mlp.gate.weight", f"mlp.experts.{{0..511}}.{_MLP}.weight", *_SHARED),
        *_delta_net(48, "model.layers", _NEXT_MIXER),
        *_MTP_MODULE,
        f"mtp.layers.0.mlp.experts.{{0..511}}.{_MLP}.weight",
        "mtp.layers.0.mlp.gate.weight",
        *(f"mtp.layers.0.{name}" for name in _SHARED),
    ),
    **{
        f"Qwen3.5-{size}": (
            *_TEXT_OUTER,
            *_layers(
                layers - 1,
                _NORMS,
                "mlp.gate.weight",
                "mlp.experts.{gate_up_proj,down_proj}",
                *_SHARED,
                prefix=_TEXT,
            ),
            *_delta_net(layers, _TEXT, _QWEN35_MIXER),
            *_MTP_MODULE,
            "mtp.layers.0.mlp.experts.{gate_up_proj,down_proj}",
            *(f"mtp.layers.0.{name}" for name in ("mlp.gate.weight", *_SHARED)),
            *_VISION,
        )
        for size, layers in (("35B-A3B", 40), ("122B-A10B", 48), ("397B-A17B", 60))
    },
    "Qwen3.5-27B": (
        *_TEXT_OUTER,
        *_layers(63, _NORMS, f"mlp.{_MLP}.weight", prefix=_TEXT),
        *_delta_net(64, _TEXT, _QWEN35_MIXER),
        *_MTP_MODULE,
        f"mtp.layers.0.mlp.{_MLP}.weight",
        *_VISION,
    ),
    **dict.fromkeys(
        ("DeepSeek-V3", "DeepSeek-V3.1"),
        (
            *_OUTER,
            *_latent(61, 3, 255, queries=_Q_LATENT, ends=_FP8),
            *_layers(61, *_MTP, *_MTP_VOCABULARY, first=61),
        ),
    ),
    "DeepSeek-V3.2": (
        *_OUTER,
        *_latent(
            61,
            3,
            255,
            queries=_Q_LATENT,
            ends=_FP8,
            more=(f"self_attn.indexer.{{wq_b,wk}}.{_FP8}", *_INDEXER),
        ),
        *_layers(61, *_MTP, *_MTP_VOCABULARY, first=61),
    ),
    "GLM-5": (
        *_OUTER,
        *_latent(
            78,
            3,
            255,
            queries=_Q_LATENT,
            ends="weight",
            more=("self_attn.indexer.{wq_b,wk}.weight", *_INDEXER),
        ),
        *_layers(78, *_MTP, *_MTP_VOCABULARY, first=78),
    ),
    "Nemotron-3-Nano-30B-A3B": _nemotron(_NEMOTRON["hybrid_override_pattern"], 127),
    "Kimi-K2-Instruct": (
        *_OUTER,
        *_latent(60, 1, 383, queries=_Q_LATENT, ends=_FP8, more=_INV_FREQ),
    ),
    "Kimi-K2.5": (
        *(
            f"language_model.{name}"
            for name in (
                *_OUTER,
                *_latent(60, 1, 383, queries=_Q_LATENT, ends="weight", routed=_INT4),
            )
        ),
        *_MOON_VISION,
    ),
    "Moonlight-16B-A3B": (
        *_OUTER,
        *_latent(26, 1, 63, queries="q_proj", ends="weight", more=_INV_FREQ),
    ),
    "GLM-4.7-Flash": (
        *_OUTER,
        *_latent(47, 1, 63, queries=_Q_LATENT, ends="weight"),
        *_layers(47, *_MTP, *_MTP_VOCABULARY, first=47),
    ),
    "GLM-4.5-Air": _glm4_moe(45, 1, 127),
    **dict.fromkeys(("GLM-4.5", "GLM-4.6", "GLM-4.7"), _glm4_moe(91, 3, 159, ",q_norm,k_norm")),
    **dict.fromkeys(
        ("MiniMax-M2", "MiniMax-M2.5"),
        (
            *_OUTER,
            *_layers(
                61,
                _NORMS,
                f"self_attn.{{q_proj,k_proj,v_proj,o_proj}}.{_FP8}",
                "self_attn.{q_norm,k_norm}.weight",
                "block_sparse_moe.{gate.weight,e_score_correction_bias}",
                f"block_sparse_moe.experts.{{0..255}}.{{w1,w2,w3}}.{_FP8}",
            ),
        ),
    ),
    **{
        f"gpt-oss-{size}": (
            *_OUTER,
            *_layers(
                last,
                _NORMS,
                "self_attn.{q_proj,k_proj,v_proj,o_proj}.{weight,bias}",
                "self_attn.sinks",
                "mlp.router.{weight,bias}",
                "mlp.experts.{gate_up_proj,down_proj}_{blocks,scales,bias}",
            ),
        )
        for size, last in (("20b", 23), ("120b", 35))
    },
}

_DEEPSEEK = example("deepseek_v3/DeepSeek-V3") | dict(
    attention_dropout=0.0,
    auto_map={
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    aux_loss_alpha=0.001,
    bos_token_id=0,
    eos_token_id=1,
    ep_size=1,
    initializer_range=0.02,
    pretraining_tp=1,
    seq_aux=True,
    use_cache=True,
)
_QWEN3_MOE = example("qwen3_moe/Qwen3-30B-A3B")
_CODER = _QWEN3_MOE | dict(
    max_position_embeddings=262144,
    max_window_layers=28,
    qkv_bias=False,
    rope_theta=10000000,
    router_aux_loss_coef=0.0,
    shared_expert_intermediate_size=0,
    use_qk_norm=True,
)
_GLM = example("glm4_moe/GLM-4.5-Air")
_KIMI_K25 = example("kimi_k25/Kimi-K2.5")
_GLM_355B = example("glm4_moe/GLM-4.7")
_GPT_OSS = example("gpt_oss/gpt-oss-20b")
_QWEN35 = example("qwen3_5_moe/Qwen3.5-35B-A3B")
_QWEN35_DENSE_TEXT = {
    key: value
    for key, value in _QWEN35["text_config"].items()
    if "expert" not in key and key not in ("moe_intermediate_size", "mlp_only_layers")
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_MOE,
    "Qwen3-235B-A22B": example("qwen3_moe/Qwen3-235B-A22B"),
    "Qwen3-Coder-30B-A3B": _CODER,
    "Qwen3-Coder-480B-A35B": example("qwen3_moe/Qwen3-Coder-480B-A35B"),
    "Qwen3-1.7B": example("qwen3/Qwen3-1.7B"),
    "Qwen3-4B": (
        example("qwen3/Qwen3-1.7B")
        | dict(
            hidden_size=2560,
            intermediate_size=9728,
            max_window_layers=36,
            num_attention_heads=32,
            num_hidden_layers=36,
        )
    ),
    "Qwen2-57B-A14B": dict(
        architectures=["Qwen2MoeForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151643,
        hidden_act="silu",
        hidden_size=3584,
        initializer_range=0.02,
        intermediate_size=18944,
        max_position_embeddings=131072,
        max_window_layers=28,
        model_type="qwen2_moe",
        moe_intermediate_size=2560,
        norm_topk_prob=False,
        num_attention_heads=28,
        num_experts=64,
        num_experts_per_tok=8,
        num_hidden_layers=28,
        num_key_value_heads=4,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=20480,
        sliding_window=65536,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.40.1",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "Qwen1.5-MoE-A2.7B": dict(
        architectures=["Qwen2MoeForCausalLM"],
        attention_dropout=0.0,
        bos_token_id=151643,
        decoder_sparse_step=1,
        eos_token_id=151643,
        hidden_act="silu",
        hidden_size=2048,
        initializer_range=0.02,
        intermediate_size=5632,
        max_position_embeddings=8192,
        max_window_layers=21,
        model_type="qwen2_moe",
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_attention_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=16,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632,
        sliding_window=32768,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.39.0.dev0",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "Qwen3-Next-80B-A3B": example("qwen3_next/Qwen3-Next-80B-A3B"),
    "Qwen3.5-35B-A3B": _QWEN35,
    "Qwen3.5-122B-A10B": example("qwen3_5_moe/Qwen3.5-122B-A10B"),
    "Qwen3.5-397B-A17B": example("qwen3_5_moe/Qwen3.5-397B-A17B"),
    "Qwen3.5-27B": (
        _QWEN35
        | dict(
            architectures=["Qwen3_5ForConditionalGeneration"],
            model_type="qwen3_5",
            text_config=_QWEN35_DENSE_TEXT
            | dict(
                hidden_size=5120,
                intermediate_size=17408,
                linear_num_value_heads=48,
                model_type="qwen3_5_text",
                num_attention_heads=24,
                num_hidden_layers=64,
                num_key_value_heads=4,
            ),
        )
    ),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V3.1": _DEEPSEEK
    | dict(quantization_config=_DEEPSEEK["quantization_config"] | dict(scale_fmt="ue8m0")),
    "DeepSeek-V3.2": (
        example("deepseek_v3/DeepSeek-V3.2")
        | dict(
            attention_dropout=0.0,
            bos_token_id=0,
            eos_token_id=1,
            ep_size=1,
            initializer_range=0.02,
            transformers_version="4.44.2",
            use_cache=True,
        )
    ),
    "Nemotron-3-Nano-30B-A3B": _NEMOTRON,
    "GLM-5": example("glm_moe_dsa/GLM-5") | dict(transformers_version="5.0.2.dev0"),
    "Kimi-K2-Instruct": (
        _DEEPSEEK
        | dict(
            bos_token_id=163584,
            eos_token_id=163585,
            first_k_dense_replace=1,
            max_position_embeddings=131072,
            model_type="kimi_k2",
            n_group=1,
            n_routed_experts=384,
            num_attention_heads=64,
            num_key_value_heads=64,
            num_nextn_predict_layers=0,
            rope_scaling=_DEEPSEEK["rope_scaling"]
            | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
            rope_theta=50000.0,
            routed_scaling_factor=2.827,
            topk_group=1,
            transformers_version="4.48.3",
            vocab_size=163840,
        )
    ),
    "Kimi-K2.5": _KIMI_K25
    | dict(
        auto_map={
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        text_config=_KIMI_K25["text_config"]
        | dict(auto_map=_DEEPSEEK["auto_map"], aux_loss_alpha=0.001, ep_size=1, seq_aux=True),
    ),
    "Moonlight-16B-A3B": example("deepseek_v3/Moonlight-16B-A3B"),
    "GLM-4.7-Flash": (
        example("glm4_moe_lite/GLM-4.7-Flash")
        | dict(
            attention_dropout=0.0,
            eos_token_id=[154820, 154827, 154829],
            pad_token_id=154820,
            use_cache=True,
        )
    ),
    "GLM-4.5-Air": _GLM,
    "GLM-4.5": _GLM_355B | dict(max_position_embeddings=131072),
    "GLM-4.6": _GLM_355B,
    "GLM-4.7": _GLM_355B,
    "MiniMax-M2": (
        example("minimax_m2/MiniMax-M2")
        | dict(
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=None,
            layernorm_full_attention_beta=1.0,
            layernorm_linear_attention_beta=1.0,
            layernorm_mlp_beta=1.0,
            mlp_intermediate_size=8192,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            router_jitter_noise=0.0,
            shared_moe_mode="sigmoid",
            sliding_window=None,
        )
    ),
    "MiniMax-M2.5": example("minimax_m2/MiniMax-M2")
    | dict(
        auto_map={
            "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        }
    ),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": example("gpt_oss/gpt-oss-120b"),
}

# Of the models in docs/models.md, those whose config.json is not here: they are told to have the
# sizes of another model of their row.
NOT_HERE = {"GLM-5.1", "Kimi-K2.6", "MiniMax-M2.1", "MiniMax-M2.7", "Qwen3.6-35B-A3B"}
