"""Model directories: files that are missing, damaged, of another model or of a kind that isn't
supported.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def of_part(kind, **changes):
    """The same with changes of the language model's keys."""
    return lambda config, folder: of_kind(
        kind, text_config=tiny_config(kind).text_config.to_dict() | changes
    )(config, folder)


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


def nan_in(name, value=float("nan")):
    def change(tensors):
        tensors[name][0, 1] = value

    return weights(change)


def integers(tensors):
    tensors[QUERY] = (tensors[QUERY] * 100).to(torch.int8)


def eight_bits(tensors):
    tensors[QUERY] = tensors[QUERY].to(torch.float8_e4m3fn)


def narrower(tensors):
    tensors[QUERY] = tensors[QUERY][:-2].contiguous()


def other_model_in_shards(config, folder):
    """A single file beside the index and files of another model."""
    sharded(lambda shards, index: shutil.copyfile(folder / "model" / WEIGHTS, shards / WEIGHTS))(
        config, folder
    )


def packed(tensors):
    del tensors[QUERY]
    tensors |= {
        f"{QUERY}_{name}": torch.zeros(4, dtype=torch.int32)
        for name in ("packed", "scale", "shape")
    }


def four_bits(config, folder):
    weights(packed)(config, folder)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    setting(quantization_config=settings)(config, folder)


CASES = (
    Case(
        "model directory missing",
        "is not a directory; give a local Hugging Face model directory",
        ("model.path=absent",),
        shows=('model.path = "absent"', "hf download"),
    ),
    Case("no config.json", "has no config.json", breaks=without("config.json")),
    Case(
        "config.json of no JSON",
        "its config.json is not a JSON object; download it again",
        breaks=file_of("config.json", b"{"),
    ),
    Case(
        "unknown model type",
        "its config.json has model_type",
        breaks=setting(model_type="llama"),
        shows=('"llama"', "use one of qwen3, qwen3_moe"),
    ),
    Case(
        "no model type",
        "its config.json has model_type",
        breaks=setting(model_type=None),
        shows=("null",),
    ),
    Case("size missing", "lacks the key 'hidden_size'", breaks=setting(hidden_size=None)),
    Case(
        "more chosen than there are experts",
        "in config.json is more than the 4 experts",
        breaks=setting(num_experts_per_tok=5),
        shows=("num_experts_per_tok=5",),
    ),
    Case(
        "one expert, its weight normalised",
        "makes every weight of an expert 1, so that no router could learn",
        breaks=setting(num_experts_per_tok=1, norm_topk_prob=True),
        shows=("num_experts_per_tok=1",),
    ),
    Case(
        "rotary embedding of the longest sequence so far",
        "its frequencies depend on the longest sequence so far",
        breaks=setting(rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
        shows=("rope_type='dynamic'", "set it to default"),
    ),
    Case(
        "windows of a family without",
        "use_sliding_window=true in config.json is not supported",
        breaks=deepseek(use_sliding_window=True),
    ),
    Case(
        "kinds of layers that contradict the windows",
        "in a qwen3_moe config.json is not supported; known:",
        breaks=setting(layer_types=["sliding_attention"]),
        shows=("layer_types=['sliding_attention']",),
    ),
    Case(
        "attention bias",
        "attention_bias=true in config.json is not supported",
        breaks=setting(attention_bias=True),
    ),
    Case(
        "another scoring function",
        "scoring_func='softmax' in a deepseek_v3 config.json is not supported",
        breaks=deepseek(scoring_func="softmax"),
        shows=("known: 'sigmoid'",),
    ),
    Case(
        "another choice of groups",
        "topk_method='greedy' in a deepseek_v3 config.json is not supported",
        breaks=deepseek(topk_method="greedy"),
        shows=("known: 'noaux_tc'",),
    ),
    Case(
        "weights of experts not normalised",
        "norm_topk_prob=False in a deepseek_v3 config.json is not supported",
        breaks=deepseek(norm_topk_prob=False),
    ),
    Case(
        "groups rated by other than two experts",
        "topk_group=1 in config.json is not supported with",
        breaks=deepseek(topk_group=1, n_routed_experts=16),
        shows=("two experts to a chosen group",),
    ),
    Case(
        "more experts than in the chosen groups",
        "can't be chosen from these groups",
        breaks=deepseek(num_experts_per_tok=7),
        shows=("n_group=4, topk_group=2",),
    ),
    Case(
        "unknown rotary embedding",
        "rope_type='longrope' in config.json is not supported",
        breaks=deepseek(rope_parameters={"rope_type": "longrope"}),
        shows=("known: default, yarn",),
    ),
    Case(
        "rank that is no size",
        "q_lora_rank=-1 in config.json is not a size",
        breaks=deepseek(q_lora_rank=-1),
    ),
    Case(
        "key-value heads of latent attention",
        "num_key_value_heads=2 in a deepseek_v3 config.json is not supported",
        breaks=deepseek(num_key_value_heads=2),
    ),
    Case(
        "layer of neither kind",
        "give dense or sparse for each of 4 layers",
        breaks=deepseek(
            model_type="glm4_moe_lite", mlp_layer_types=["dense", "odd", "sparse", "sparse"]
        ),
    ),
    Case(
        "perturbed sigmoid routers",
        "a perturbation is defined for softmax routers",
        breaks=deepseek(),
        overrides=("routing.perturbation=my.py:noise",),
    ),
    Case(
        "model that is not supported",
        'its config.json has model_type "qwen3_vl_moe"; use one of qwen3, ',
        breaks=of_kind("next", model_type="qwen3_vl_moe"),
    ),
    Case(
        "norms of each head",
        "qk_norm_type='per_head' in a minimax_m2 config.json is not supported",
        breaks=of_kind("minimax", qk_norm_type="per_head"),
        shows=("known: 'per_layer'",),
    ),
    Case(
        "a shared expert of MiniMax-M2",
        "shared_intermediate_size=8 in a minimax_m2 config.json is not supported",
        breaks=of_kind("minimax", shared_intermediate_size=8),
    ),
    Case(
        "layers of linear attention of MiniMax",
        "in a minimax_m2 config.json is not supported; known: [1, 1, 1, 1]",
        breaks=of_kind("minimax", attn_type_list=[1, 0, 1, 1]),
        shows=("attn_type_list=[1, 0, 1, 1]",),
    ),
    Case(
        "rotated dimensions that are no size",
        "rotary_dim=0 in config.json is not a size",
        breaks=of_kind("minimax", rotary_dim=0),
    ),
    Case(
        "language model of another family",
        "model_type='qwen3_moe' in the text_config of a qwen3_5_moe config.json",
        breaks=of_part("qwen35_moe", model_type="qwen3_moe"),
        shows=("known: 'qwen3_5_moe_text'",),
    ),
    Case(
        "keys of a language model that has no place of its own",
        "of a qwen3_5_moe model lacks the key 'text_config'",
        breaks=of_kind("qwen35_moe_text", model_type="qwen3_5_moe"),
    ),
    Case(
        "embeddings tied in one place only",
        "tie_word_embeddings=False in config.json and True in its text_config",
        breaks=of_part("qwen35", tie_word_embeddings=True),
    ),
    Case(
        "another activation",
        "hidden_act='gelu' in a qwen3_moe config.json is not supported; known: 'silu'",
        breaks=setting(hidden_act="gelu"),
    ),
    Case(
        "sigmoid scores where a family has a softmax",
        "scoring_func='sigmoid' in a qwen3_moe config.json is not",
        breaks=setting(scoring_func="sigmoid"),
        shows=("known: 'softmax'",),
    ),
    Case(
        "groups of experts of a family without",
        "n_group=2 in a minimax_m2 config.json is not supported; known: 1",
        breaks=of_kind("minimax", n_group=2),
    ),
    Case(
        "scaled weights of a family without",
        "routed_scaling_factor=2.5 in a minimax_m2 config.json is not",
        breaks=of_kind("minimax", routed_scaling_factor=2.5),
        shows=("known: 1.0",),
    ),
    Case(
        "sparse attention",
        "index_topk=2048 in a deepseek_v3 config.json is not supported",
        breaks=deepseek(index_topk=2048),
    ),
    Case(
        "norms of latent attention's heads",
        "use_qk_norm=True in a deepseek_v3 config.json is not supported",
        breaks=deepseek(use_qk_norm=True),
        shows=("known: False",),
    ),
    Case(
        "latent attention with a part of its rotated dimensions rotated",
        "partial_rotary_factor=0.5 in a glm4_moe_",
        breaks=of_kind("glm_lite", partial_rotary_factor=0.5),
        shows=("known: 1.0",),
    ),
    Case(
        "kinds of layers of a family with one",
        "in a glm4_moe config.json is not supported; known: ['full_attention'",
        breaks=of_kind("glm", layer_types=["sliding_attention"] * 4),
        shows=("layer_types=['sliding_attention'",),
    ),
    Case(
        "attention without its gate",
        "attn_output_gate=False in a qwen3_5_moe config.json is not supported",
        breaks=of_part("qwen35_moe", attn_output_gate=False),
        shows=("known: True",),
    ),
    Case(
        "gated attention without its gate",
        "attn_output_gate=False in a qwen3_next config.json is not supported",
        breaks=of_kind("next", attn_output_gate=False),
        shows=("known: True",),
    ),
    Case(
        "state of a delta net in another type",
        "mamba_ssm_dtype='bfloat16' in a qwen3_5 config.json",
        breaks=of_part("qwen35", mamba_ssm_dtype="bfloat16"),
        shows=("known: 'float32'",),
    ),
    Case(
        "weights of experts that do not sum to 1",
        "norm_topk_prob=False in a qwen3_5_moe_text config.json",
        breaks=of_kind("qwen35_moe_text", norm_topk_prob=False),
        shows=("known: True",),
    ),
    Case(
        "dense layer where all have experts",
        "mlp_only_layers=[1] in a qwen3_5_moe config.json is not supported",
        breaks=of_part("qwen35_moe", mlp_only_layers=[1]),
        shows=("known: []",),
    ),
    Case(
        "rotary embedding of a language model",
        "rope_type='yarn' in config.json is not supported",
        breaks=of_part("qwen35", rope_parameters={"rope_type": "yarn"}),
        shows=("only 'default' is",),
    ),
    Case(
        "size of a language model",
        "linear_num_key_heads=0 in config.json is not a size",
        breaks=of_part("qwen35", linear_num_key_heads=0),
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
        "extra weight",
        "which the model does not use (1 extra)",
        breaks=weights(lambda w: w.update({"model.layers.7.extra": torch.ones(2)})),
        shows=("model.layers.7.extra",),
    ),
    Case(
        "weight of the wrong size",
        "in the checkpoint; config.json makes it",
        breaks=weights(narrower),
        shows=(QUERY,),
    ),
    Case(
        "integer weights",
        "use a checkpoint that isn't quantised (F32, BF16, F16)",
        breaks=weights(integers),
        shows=(f"{QUERY} is stored as I8",),
    ),
    Case(
        "8-bit float weights",
        "use a checkpoint that isn't quantised (F32, BF16, F16)",
        breaks=weights(eight_bits),
        shows=(f"{QUERY} is stored as F8_E4M3",),
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
        "index of no JSON", "not valid JSON", breaks=sharded(lambda f, index: index.write_text("{"))
    ),
    Case(
        "NaN in the weights",
        "holds NaN or infinity in the checkpoint",
        breaks=nan_in(QUERY),
        shows=(QUERY,),
    ),
    Case(
        "infinity in the weights",
        "holds NaN or infinity in the checkpoint",
        breaks=nan_in("lm_head.weight", float("-inf")),
        shows=("lm_head.weight",),
    ),
    Case(
        "single file beside another model's shards",
        "places the weights in model-00001-of-",
        breaks=other_model_in_shards,
        shows=("remove model.safetensors or the index",),
    ),
    Case(
        "weights in four bits",
        "its weights are quantised by compressed-tensors",
        breaks=four_bits,
        shows=("pack-quantized", "give the model in bfloat16"),
    ),
    Case(
        "weights in four bits that the config does not name",
        "its weights are quantised by compressed-tensors",
        breaks=weights(packed),
    ),
    Case(
        "adapters beside the weights",
        "has adapter_config.json, whose adapters Transformers would add",
        breaks=file_of("adapter_config.json", b"{}"),
        shows=("megatron-gspo convert merge",),
    ),
    Case(
        "list of rotary embeddings",
        "rope_type=['yarn'] in config.json is not supported",
        breaks=setting(rope_parameters={"rope_type": ["yarn"]}),
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
        "no tokenizer",
        "has no tokenizer (none of tokenizer.json",
        breaks=without("tokenizer*", "vocab*", "merges*"),
    ),
    Case(
        "generation_config.json of many brackets",
        "generation_config.json: not valid JSON (too many brackets",
        breaks=file_of("generation_config.json", b"[" * 10**6),
    ),
    Case(
        "generation_config.json of a list",
        "generation_config.json: not valid JSON (a list, no object)",
        breaks=file_of("generation_config.json", b"[1]"),
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
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model(case, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    config = small_config(str(tmp_path / "model"), tmp_path)
    if case.breaks:
        case.breaks(config, tmp_path)
    check(case, start(config, tmp_path, *case.overrides))
