"""Model directories: files that are missing, damaged, of another model or of a kind that isn't
supported.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.models import ModelError, family_of
from megatron_gspo.models.hf_checkpoint import CheckpointReader, write_checkpoint
from tests.support.command_line import ROWS, Case, check, small_config, start, write_rows
from tests.support.tiny_models import tiny_config

WEIGHTS = "model.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def setting(**changes):
    """Changes of config.json; None removes a key."""

    def change(config, folder):
        file = folder / "model" / "config.json"
        content = json.loads(file.read_text()) | changes
        file.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return change


def file_of_null(key):
    """config.json with null for a key."""

    def change(config, folder):
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}))

    return change


def of_kind(kind, **changes):
    """config.json of a small model of another family with changes."""

    def write(config, folder):
        (folder / "model" / "config.json").write_text(
            json.dumps({**tiny_config(kind).to_dict(), **changes})
        )

    return write


def deepseek(**changes):
    return of_kind("deepseek", **changes)


def weights(change):
    """Weights after ``change``, which gets them by name."""

    def write(config, folder):
        tensors = load_file(folder / "model" / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / "model" / WEIGHTS, metadata={"format": "pt"})

    return write


def file_of(name, content):
    return lambda config, folder: (folder / "model" / name).write_bytes(content)


def without(*names):
    def remove(config, folder):
        for name in names:
            for file in (folder / "model").glob(name):
                file.unlink()

    return remove


def pickled_only(config, folder):
    torch.save(load_file(folder / "model" / WEIGHTS), folder / "model" / "pytorch_model.bin")
    (folder / "model" / WEIGHTS).unlink()


def sharded(change):
    """The weights in several files, and then ``change(folder, index)``."""

    def write(config, folder):
        model = folder / "model"
        with CheckpointReader(model) as reader:
            tensors = [(name, reader.read(name)) for name in sorted(reader.names)]
        write_checkpoint(folder / "sharded", tensors, source=model, max_shard_bytes=20_000)
        config["model"]["path"] = str(folder / "sharded")
        index = folder / "sharded" / "model.safetensors.index.json"
        change(folder / "sharded", index)

    return write


def wrong_shard(folder, index):
    content = json.loads(index.read_text())
    content["weight_map"][QUERY] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))


def no_weight_map(folder, index):
    index.write_text("{}")


def no_end_token(config, folder):
    setting(eos_token_id=None)(config, folder)
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / "model" / name
        if file.is_file():
            content = json.loads(file.read_text())
            content.pop("eos_token", None)
            file.write_text(json.dumps(content))


def demonstrations_without_end(config, folder):
    no_end_token(config, folder)
    config["algorithm"] = {"name": "sft"}
    config["rollout"] |= {"engine": "sft", "n_samples_per_prompt": 1}
    config["training"]["global_batch_size"] = 2


def small_vocabulary(config, folder):
    """A model with fewer ids than its tokenizer."""
    tensors = load_file(folder / "model" / WEIGHTS)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:12].contiguous()
    save_file(tensors, folder / "model" / WEIGHTS, metadata={"format": "pt"})
    setting(vocab_size=12)(config, folder)
    write_rows(folder / "prompts.jsonl", ROWS)


def teacher_with_another_tokenizer(config, folder):
    """The same model, whose tokenizer has swapped two ids."""
    teacher = shutil.copytree(folder / "model", folder / "teacher")
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    config["distillation"] = {"teacher": str(teacher)}
    config["algorithm"] = {"name": "gspo_token"}


def nan_in(name, value=float("nan")):
    def change(tensors):
        tensors[name][0, 1] = value

    return weights(change)


def integers(tensors):
    tensors[QUERY] = (tensors[QUERY] * 100).to(torch.int8)


CASES = (
    Case(
        "unknown model type",
        "its config.json has model_type",
        breaks=setting(model_type="llama"),
        shows=('"llama"', "use one of qwen3, qwen3_moe"),
    ),
    Case("size missing", "lacks the key 'hidden_size'", breaks=setting(hidden_size=None)),
    Case(
        "perturbed sigmoid routers",
        "a perturbation is defined for softmax routers",
        breaks=deepseek(),
        overrides=("routing.perturbation=my.py:noise",),
    ),
    Case("no weights", "has no *.safetensors weights; download them", breaks=without(WEIGHTS)),
    Case(
        "pickled weights only",
        "only pickled ones (*.bin), which could run code when loaded",
        breaks=pickled_only,
        shows=("save_pretrained",),
    ),
    Case(
        "weights of an adapter",
        "neither model.safetensors nor model.safetensors.index.json there",
        breaks=lambda c, f: (f / "model" / WEIGHTS).rename(
            f / "model" / "adapter_model.safetensors"
        ),
    ),
    Case(
        "missing weight",
        "config.json and weights disagree",
        breaks=weights(lambda w: w.pop(QUERY)),
        shows=(f"checkpoint lacks {QUERY} (1 missing)",),
    ),
    Case(
        "integer weights",
        "use a checkpoint that isn't quantised (F32, BF16, F16)",
        breaks=weights(integers),
        shows=(f"{QUERY} is stored as I8",),
    ),
    Case(
        "weight not in its shard",
        "which model.safetensors.index.json places there",
        breaks=sharded(wrong_shard),
        shows=(f"lacks {QUERY}",),
    ),
    Case(
        "index without a map",
        "has no weight_map of tensors to files",
        breaks=sharded(no_weight_map),
    ),
    Case(
        "NaN in the weights",
        "holds NaN or infinity in the checkpoint",
        breaks=nan_in(QUERY),
        shows=(QUERY,),
    ),
    Case(
        "adapters beside the weights",
        "has adapter_config.json, whose adapters Transformers would add",
        breaks=file_of("adapter_config.json", b"{}"),
        shows=("megatron-gspo convert merge",),
    ),
    Case(
        "null for a number",
        "rms_norm_eps=None in config.json is not supported; give a number above 0",
        breaks=file_of_null("rms_norm_eps"),
    ),
    Case(
        "two names of one key",
        "are two names of one key; remove one of them",
        breaks=setting(num_experts=8, num_local_experts=4),
        shows=("num_experts=8 and num_local_experts=4",),
    ),
    Case(
        "generation_config.json of many brackets",
        "generation_config.json: not valid JSON (too many brackets",
        breaks=file_of("generation_config.json", b"[" * 10**6),
    ),
    Case("no end token", "no end token in the configs or the tokenizer", breaks=no_end_token),
    Case(
        "no end token for demonstrations",
        "its tokenizer has no end token, which ends every demonstration",
        breaks=demonstrations_without_end,
    ),
    Case(
        "tokenizer of another model",
        "the model's vocabulary ends at 11",
        breaks=small_vocabulary,
        shows=("prompt 0 has the token id",),
    ),
    Case(
        "teacher with another tokenizer",
        'has another tokenizer: token "a" is id',
        breaks=teacher_with_another_tokenizer,
        shows=("distillation.teacher", "use a teacher with the policy's tokenizer"),
    ),
)


# What a family does not have: kind of a small model, changes of its config.json, the message.
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 .* more than the 8 experts"),
    ("moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "every weight of an expert 1"),
    ("moe", {"rope_parameters": {"rope_type": "dynamic"}}, "depend on the longest sequence so far"),
    ("moe", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type=\['yarn'\]"),
    ("moe", {"attention_bias": True}, "attention_bias=true"),
    ("moe", {"hidden_act": "gelu"}, "hidden_act='gelu' .* known: 'silu'"),
    ("moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' .* known: 'softmax'"),
    ("deepseek", {"scoring_func": "softmax"}, "scoring_func='softmax' .* known: 'sigmoid'"),
    ("deepseek", {"topk_method": "greedy"}, "topk_method='greedy' .* known: 'noaux_tc'"),
    ("deepseek", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("deepseek", {"topk_group": 1, "n_routed_experts": 16}, "two experts to a chosen group"),
    ("deepseek", {"num_experts_per_tok": 7}, "can't be chosen from these groups"),
    ("deepseek", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
    ("deepseek", {"q_lora_rank": -1}, "q_lora_rank=-1 in config.json is not a size"),
    ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("deepseek", {"index_topk": 2048}, "index_topk=2048"),
    ("deepseek", {"use_qk_norm": True}, "use_qk_norm=True .* known: False"),
    ("glm_lite", {"mlp_layer_types": ["dense", "odd", "sparse", "sparse"]}, "give dense or sparse"),
    ("glm_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .* known: 1.0"),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=null .* made of the latent"),
    ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim=4 .* less than qk_rope_head_dim=8"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk=0 in config.json is not a size"),
    ("deepseek_v32", {"indexer_rope_interleave": True}, "interleave=True .* known: False"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "known: .'indexed_attention'"),
    ("glm_dsa", {"indexer_rope_interleave": False}, "interleave=False .* known: True"),
    ("glm_dsa", {"indexer_types": ["full", "full", "full", "shared"]}, "share an earlier layer's"),
    ("glm_dsa", {"indexer_types": None, "index_topk_freq": 4}, "index_topk_freq=4 .* known: 1"),
    ("glm_dsa", {"indexer_types": None, "index_topk_pattern": "FFFS"}, "share an earlier layer's"),
    ("glm", {"layer_types": ["sliding_attention"] * 4}, r"layer_types=\['sliding_attention'"),
    ("minimax", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' .* known: 'per_layer'"),
    ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    ("minimax", {"attn_type_list": [1, 0, 1, 1]}, r"attn_type_list=\[1, 0, 1, 1\]"),
    ("minimax", {"rotary_dim": 0}, "rotary_dim=0 in config.json is not a size"),
    ("minimax", {"n_group": 2}, "n_group=2 .* known: 1"),
    ("minimax", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5 .* known: 1.0"),
    ("nemotron", {"moe_latent_size": 1024}, "moe_latent_size=1024 .*Nemotron-3-Super.*not built"),
    ("nemotron", {"layers_block_type": ["mamba", "conv"]}, "layers of kind 'conv'; known: M"),
    ("nemotron", {"layers_block_type": None}, "hybrid_override_pattern=None .* give a letter of M"),
    ("nemotron", {"layers_block_type": ["moe"]}, "no layer of Mamba-2"),
    ("nemotron", {"hybrid_override_pattern": "ME*M-EMM"}, "not the same layers; remove one"),
    ("nemotron", {"num_hidden_layers": 7}, "num_hidden_layers=7 .* kinds are 8; give as many"),
    ("nemotron", {"n_groups": 3}, "mamba_num_heads=8 .* no multiple of n_groups=3"),
    ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' .* known: 'relu2'"),
    ("nemotron", {"use_conv_bias": False}, "use_conv_bias=False .* known: True"),
    (
        "nemotron",
        {"time_step_limit": [0.001, 0.1]},
        r"time_step_limit=\[0.001, 0.1\] .* not clamped",
    ),
    ("nemotron", {"tie_word_embeddings": True}, "tie_word_embeddings=True .* known: False"),
    ("nemotron", {"n_shared_experts": 2}, "n_shared_experts=2 .* known: 1"),
    ("nemotron", {"ssm_state_size": 0}, "ssm_state_size=0 in config.json is not a size"),
    ("next", {"attn_output_gate": False}, "attn_output_gate=False .* known: True"),
    ("qwen35_moe_text", {"model_type": "qwen3_5_moe"}, "lacks the key 'text_config'"),
    ("qwen35_moe", {"text_config": {"model_type": "qwen3_moe"}}, "known: 'qwen3_5_moe_text'"),
    ("qwen35_moe", {"text_config": {"attn_output_gate": False}}, "attn_output_gate=False"),
    ("qwen35_moe", {"text_config": {"mlp_only_layers": [1]}}, r"mlp_only_layers=\[1\]"),
    ("qwen35", {"text_config": {"tie_word_embeddings": True}}, "and True in its text_config"),
    ("qwen35", {"text_config": {"mamba_ssm_dtype": "bfloat16"}}, "known: 'float32'"),
    ("qwen35", {"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "only 'default' is"),
    (
        "qwen35",
        {"text_config": {"linear_num_key_heads": 0}},
        "linear_num_key_heads=0 .* not a size",
    ),
)


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_a_config_that_a_family_does_not_have(kind, changes, message):
    config = tiny_config(kind).to_dict()
    for name, value in changes.items():
        config[name] = {**config[name], **value} if name == "text_config" else value
    with pytest.raises(ModelError, match=message) as caught:
        family_of(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model(case, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    config = small_config(str(tmp_path / "model"), tmp_path)
    if case.breaks:
        case.breaks(config, tmp_path)
    check(case, start(config, tmp_path, *case.overrides))
