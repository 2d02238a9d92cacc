"""Small random Hugging Face models for tests, saved to a directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    Kimi_K25Config,
    MiniMaxM2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# Routers with all that DeepSeek-V3's have: two of four groups, scaling, a shared expert; a dense
# layer first.
_SIGMOID: dict[str, object] = dict(
    moe_intermediate_size=16,
    n_routed_experts=12,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    routed_scaling_factor=1.7,
    first_k_dense_replace=1,
)
# Another epsilon than that of the latents' norms; heads of 12 + 8 and, of values, 16 dimensions.
_LATENT: dict[str, object] = dict(
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_key_value_heads=4,
    rms_norm_eps=1e-3,
)
# Fewer positions than the samples have, and an indexer's heads of 12, of which 8 are rotated.
_INDEXER: dict[str, object] = dict(index_topk=6, index_n_heads=8, index_head_dim=12)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=8.0,
    original_max_position_embeddings=8,
    beta_fast=2.0,
    beta_slow=0.5,
)
_SCALED = YARN | dict(mscale=0.7, mscale_all_dim=1.2)
# Windows shorter than the samples, and activations beyond the clamp on both sides.
_GPT_OSS: dict[str, object] = dict(
    intermediate_size=16,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=5,
    swiglu_limit=0.8,
    rope_parameters=YARN | dict(truncate=False),
)
# Two layers of each kind; two value heads to a key head; half of each attention head is rotated.
_DELTA: dict[str, object] = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-3,
)
# Half of each head is rotated; another epsilon than the default.
_MINIMAX: dict[str, object] = dict(
    intermediate_size=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    rms_norm_eps=1e-3,
    rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
)
# A layer of each kind, and more of Mamba-2; two heads to a group; another epsilon than the default.
_NEMOTRON: dict[str, object] = dict(
    hybrid_override_pattern="ME*M-EM*",
    num_hidden_layers=8,
    mamba_num_heads=8,
    mamba_head_dim=6,
    n_groups=4,
    ssm_state_size=10,
    conv_kernel=4,
    chunk_size=8,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
    n_routed_experts=12,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    layer_norm_epsilon=1e-3,
    rescale_prenorm_residual=False,
)
_HALF = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
_FEW: dict[str, object] = dict(
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=24,
)
_NEXT = _DELTA | _FEW | dict(mlp_only_layers=[2], rope_parameters=_HALF)
# The sections of the rotated half would move its frequencies about if they had positions of their
# own.
_QWEN35 = _DELTA | dict(
    rope_parameters=_HALF | dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
)
_VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=32,
    num_position_embeddings=16,
)
_MOON_VISION = dict(
    num_hidden_layers=1,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    patch_size=2,
    pos_emb_height=4,
    pos_emb_width=4,
)
# The quantization_config of Kimi-K2.5.
INT4 = dict(
    config_groups=dict(
        group_0=dict(
            input_activations=None,
            output_activations=None,
            targets=["Linear"],
            weights=dict(
                actorder=None,
                block_structure=None,
                dynamic=False,
                group_size=32,
                num_bits=4,
                observer="minmax",
                observer_kwargs={},
                strategy="group",
                symmetric=True,
                type="int",
            ),
        )
    ),
    format="pack-quantized",
    ignore=[
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    kv_cache_scheme=None,
    quant_method="compressed-tensors",
    quantization_status="compressed",
)
# As the published models are, with a vision tower: their language models' kinds, and what they have
# besides.
_PUBLISHED: dict[str, tuple[type[PretrainedConfig], str, dict[str, object]]] = {
    "qwen35": (Qwen3_5Config, "qwen35_text", dict(vision_config=_VISION)),
    "qwen35_moe": (Qwen3_5MoeConfig, "qwen35_moe_text", dict(vision_config=_VISION)),
    "kimi": (
        Kimi_K25Config,
        "deepseek",
        dict(vision_config=_MOON_VISION, projection_hidden_size=16),
    ),
}
_ZERO_CENTRED = {"next", "qwen35", "qwen35_text", "qwen35_moe", "qwen35_moe_text"}
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "deepseek": (DeepseekV3Config, _SIGMOID | _LATENT | dict(rope_parameters=_SCALED)),
    "moonlight": (
        DeepseekV3Config,
        _SIGMOID | _LATENT | dict(q_lora_rank=None, n_group=1, topk_group=1),
    ),
    "glm_lite": (
        Glm4MoeLiteConfig,
        _SIGMOID | _LATENT | dict(rope_interleave=False, n_shared_experts=2),
    ),
    "deepseek_v32": (
        DeepseekV32Config,
        _SIGMOID | _LATENT | _INDEXER | dict(rope_parameters=_SCALED),
    ),
    "glm_dsa": (
        GlmMoeDsaConfig,
        _SIGMOID
        | _LATENT
        | _INDEXER
        | dict(
            n_group=1, topk_group=1, rope_parameters=dict(rope_type="default", rope_theta=100.0)
        ),
    ),
    "gpt_oss": (GptOssConfig, _GPT_OSS),
    "next": (Qwen3NextConfig, _NEXT),
    "nemotron": (NemotronHConfig, _NEMOTRON),
    "minimax": (MiniMaxM2Config, _MINIMAX),
    "qwen35_text": (Qwen3_5TextConfig, _QWEN35),
    "qwen35_moe_text": (Qwen3_5MoeTextConfig, _QWEN35 | _FEW),
    "glm": (Glm4MoeConfig, _SIGMOID | dict(use_qk_norm=True, attention_bias=True)),
}


def tiny_config(kind: str = "moe", **overrides: object) -> PretrainedConfig:
    """A Qwen3 (``dense``), Qwen3-MoE (``moe``) or Qwen2-MoE (``shared``, for its shared expert)
    config, or one of ``_FAMILIES``.

    It has a few thousand parameters, which every layout divides.
    """
    common: dict[str, object] = dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    if kind in _PUBLISHED:
        whole, text_kind, besides = _PUBLISHED[kind]
        text = tiny_config(text_kind, **overrides).to_dict()
        tied = text["tie_word_embeddings"]
        return whole(text_config=text, tie_word_embeddings=tied, **besides)
    if kind in _FAMILIES:
        family, facts = _FAMILIES[kind]
        if "qk_rope_head_dim" in facts:
            del common["head_dim"]
        return family(**{**common, **facts, **overrides})
    if kind == "dense":
        return Qwen3Config(**{**common, **overrides})
    moe: dict[str, object] = dict(
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    if kind == "shared":  # a head is hidden / heads there
        shared: dict[str, object] = dict(
            shared_expert_intermediate_size=24, norm_topk_prob=False, num_experts=4, head_dim=8
        )
        return Qwen2MoeConfig(**{**common, **moe, **shared, **overrides})
    return Qwen3MoeConfig(**{**common, **moe, **overrides})


def save_tiny_model(
    path: str | Path,
    kind: str = "moe",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> str:
    """Write a random model; returns the directory. Norms and biases are drawn too, so that a
    swap of two shows.
    """
    if kind == "kimi":
        return save_kimi_model(path, seed, dtype, **overrides)
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if kind in _PUBLISHED else AutoModelForCausalLM
    model = auto.from_config(tiny_config(kind, **overrides)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer.k_norm." in name:  # as in DeepSeek's own code
                parameter.data = parameter.data.float()
            if "norm" in name:
                centre = 0.0 if kind in _ZERO_CENTRED and "linear_attn" not in name else 1.0
                parameter.uniform_(centre - 0.5, centre + 0.5)
            elif name.endswith("A_log"):  # a state that lasts over several tokens
                parameter.uniform_(-1.5, 0.5)
            elif name.endswith(("bias", "conv1d.weight", ".D")):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("sinks"):
                parameter.uniform_(0.0, 2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # float32, as published.
                buffer.data = torch.empty(buffer.shape).uniform_(-0.12, 0.12)
    # the published files have the experts of a layer in one tensor, as Transformers has in memory
    model.save_pretrained(path, save_original_format=kind not in _PUBLISHED)
    return str(path)


def save_kimi_model(
    path: str | Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
    **overrides: object,
) -> str:
    """A random model under the names of Kimi-K2.5's files, which Transformers 5.24 reads and does
    not write. packed: experts in INT4, as published; their sizes are then 64 and 32, since a group
    has 32 columns. Returns the directory."""
    sizes = dict(hidden_size=64, moe_intermediate_size=32) if packed else {}
    save_tiny_model(path, "deepseek", seed, dtype, **{**sizes, **overrides})
    file = Path(path) / "model.safetensors"
    tensors = {f"language_model.{name}": value for name, value in load_file(file).items()}
    g = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if packed and ".experts." in name]:
        rows, columns = tensors.pop(name).shape
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=g)
        scales = torch.rand(rows, columns // 32, generator=g) / 8
        tensors[name + "_packed"] = words.int()
        tensors[name + "_scale"] = scales.bfloat16()
        tensors[name + "_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    tensors["vision_tower.patch_embed.proj.weight"] = torch.randn(
        16, 3, 2, 2, generator=g, dtype=dtype
    )
    tensors["mm_projector.pre_norm.weight"] = torch.randn(16, generator=g, dtype=dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    config = tiny_config("kimi", **{**sizes, **overrides}).to_dict()
    config["text_config"]["model_type"] = "kimi_k2"
    if packed:
        config["text_config"]["quantization_config"] = INT4
    (Path(path) / "config.json").write_text(json.dumps(config))
    return str(path)


def save_mxfp4_model(path: str | Path, seed: int = 0) -> str:
    """A random gpt-oss model stored as the published ones are: bfloat16, and the experts' matrices
    in MXFP4. Hidden and expert sizes are 64 and 32, since a block has 32 numbers. Returns the
    directory."""
    save_tiny_model(path, "gpt_oss", seed, torch.bfloat16, hidden_size=64, intermediate_size=32)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    g = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        sizes = experts, outputs, inputs // 32
        tensors[name + "_blocks"] = torch.randint(256, (*sizes, 16), generator=g, dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(118, 125, sizes, generator=g, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((Path(path) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (Path(path) / "config.json").write_text(json.dumps(config))
    return str(path)


def stored_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory of one file, those in MXFP4 as Transformers' own
    conversion has them.
    """
    tensors = load_file(Path(path) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        scales = tensors.pop(name.replace("_blocks", "_scales"))
        tensors[name.removesuffix("_blocks")] = convert_moe_packed_tensors(
            tensors.pop(name), scales
        )
    return tensors
