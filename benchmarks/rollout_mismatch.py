"""How far a rollout engine and the trainer are apart for the same weights, in GRPO's and GSPO's ratios.

    python benchmarks/rollout_mismatch.py               # a real SGLang server, in float32 and bfloat16
    python benchmarks/rollout_mismatch.py --quantized   # the embedded engine with weights in eight bits, float32 else

A random Qwen3-MoE (4 layers, 8 experts, 2 active, weights of standard deviation 0.1) draws responses of three lengths
on the engine; the trainer scores the same tokens before any update. Were both engines the same, every ratio would be 1.
GRPO's ratio is one token's; GSPO's the geometric mean over the response. Torch-native kernels on a CPU on both sides:
other kernels, as on GPUs, differ by more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml

from benchmarks.common import ROOT, hardware, say, versions
from benchmarks.result_files import save

LENGTHS = (8, 64, 256)
FORMATS = ("fp8_block", "fp8_tensor", "int8")
LISTS = {"modules": ["model.layers.*.self_attn.*", "model.layers.*.mlp.experts.*.*"],
         "exclude": ["model.layers.*.mlp.gate", "lm_head"]}  # fmt: skip
PROMPTS, SAMPLES = 16, 4


def write_model(folder: Path) -> None:
    """The model, sampled in float32 and cast on loading."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from megatron_gspo.tools.make_tiny_model import character_tokenizer

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=104, hidden_size=128, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **{"head_dim": 32},  # read by the model, not declared by the class
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def config_of(folder: Path, name: str, dtype: str, length: int, rollout: dict[str, Any],
              **servers: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    return servers | {
        "run_dir": str(folder / f"{name}-{length}"),
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_length": 32, "verifier_timeout": None},
        "rollout": {"rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES, "max_response_length": length,
                    **rollout},
        "routing": {"compare_rollout": True},
        "training": {"steps": 1, "global_batch_size": PROMPTS * SAMPLES, "max_tokens_per_micro_batch": 4096},
        "checkpoint": {"export_hf": False},
        "tracking": {"plot": False},
    }  # fmt: skip


def measure(folder: Path, name: str, dtype: str, length: int, rollout: dict[str, Any],
            **servers: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The first step's figures. name: of the row; rollout: its engine and settings; servers: their section."""
    config = config_of(folder, name, dtype, length, rollout, **servers)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_gspo.train", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    (line,) = (Path(config["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    kept = ("mismatch/", "routing/rollout_", "response_length/mean")
    return {"dtype": name, "length": length} | {key: value for key, value in record.items() if key.startswith(kept)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| dtype | tokens | largest difference | mean | GRPO's ratio, 1 % to 99 % | GSPO's ratio, 1 % to 99 % | "
             "experts that differ | tokens with one |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for row in rows:
        token, sequence = (f"{row[f'mismatch/ratio_{kind}/p01']:.4f} to {row[f'mismatch/ratio_{kind}/p99']:.4f}"
                           for kind in ("token", "sequence"))  # fmt: skip
        lines.append(
            f"| {row['dtype']} | {row['response_length/mean']:.0f} | {row['mismatch/abs_diff_max']:.2g} | "
            f"{row['mismatch/abs_diff']:.2g} | {token} | {sequence} | {row['routing/rollout_flip_rate']:.2%} | "
            f"{row['routing/rollout_flipped_tokens']:.2%} |"
        )
    return lines


def with_server(folder: Path, python: str) -> list[dict[str, Any]]:
    """Rows of a real SGLang server, one for each dtype."""
    from megatron_gspo.config import SGLangConfig
    from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
    from megatron_gspo.servers.server_processes import LocalServers

    rows = []
    for dtype in ("float32", "bfloat16"):
        config = SGLangConfig(num_servers=1, python=python)
        launch = SGLangLaunch(config, str(folder / "model"), dtype, routed_experts=True, log_dir=str(folder))
        with LocalServers(launch) as servers:
            for length in LENGTHS:
                section = {"urls": servers.urls, "weight_transport": "tensor"}
                rows.append(measure(folder, dtype, dtype, length, {"engine": "sglang"}, sglang=section))
                say(rows[-1])
    return rows


def quantized(folder: Path) -> list[dict[str, Any]]:
    """Rows of the embedded engine with weights in eight bits."""
    rows = []
    for name in FORMATS:
        for length in LENGTHS:
            rollout = {"engine": "embedded", "quantization": {"format": name, **LISTS}}
            rows.append(measure(folder, name, "float32", length, rollout))
            say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter with sglang (default: .venv-sglang, made if it's absent)")
    parser.add_argument("--json", type=Path, help="write figures and versions to this file")
    parser.add_argument("--quantized", action="store_true", help="weights in eight bits, without a server")
    args = parser.parse_args()
    from megatron_gspo.tools.server_environment import server_python

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        prompts = [json.dumps({"prompt": f"{i} + {i * 7 % 10} =", "answer": "0"}) for i in range(PROMPTS)]
        (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
        rows = quantized(folder) if args.quantized else with_server(folder, args.python or server_python("sglang"))
    lines = table(rows)
    print("\n".join(lines))
    if args.json:
        result = {"rows": rows, "table": lines, "hardware": hardware(), "versions": versions()}
        save(args.json, result)


if __name__ == "__main__":
    main()
