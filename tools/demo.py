"""The demo: cold-start a small Qwen3-MoE, train it with GSPO on four processes, and show what came of it.

    python -m megatron_gspo.tools.demo [--folder runs/demo] [--processes 4]

Everything runs through the same front doors that a cluster uses: ``torchrun -m megatron_gspo.train CONFIG``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_gspo.config import load_config
from megatron_gspo.tools.compare.cold_start import (
    INSTRUCTION,
    held_out_and_training,
    imitate,
    train,
    write_demonstrations,
)
from megatron_gspo.tools.compare.study_plan import ColdStartFiles
from megatron_gspo.tools.make_tiny_model import write_tiny_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "qwen3_moe"


def transformers_accuracy(model: Path, config: Path) -> float:
    """Held-out accuracy of an exported checkpoint with Transformers' own ``generate``, sampled at temperature 1."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model)
    run, (held_out, _) = load_config(config), held_out_and_training(model, config)
    batch = tokenizer([prompt.text for prompt in held_out], return_tensors="pt", padding=True)
    output = network.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=run.rollout.max_response_length,
        num_return_sequences=run.evaluation.n_samples,
    )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [prompt.answer for prompt in held_out for _ in range(run.evaluation.n_samples)]
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/demo"),
        help="where everything is written (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=4,
        help="a multiple of 2: the layout is TP 2, EP 2 (default: %(default)s)",
    )
    options = parser.parse_args()
    disable_progress_bar()
    started = time.monotonic()
    folder, gspo = options.folder, options.folder / "gspo"
    files = ColdStartFiles(folder)
    shutil.rmtree(folder, ignore_errors=True)
    count = write_tiny_model(files.model, words=[INSTRUCTION], expert_width=64)
    write_demonstrations(files, EXAMPLES / "tiny_gspo.yaml")
    print(f"1/3  a random Qwen3-MoE of {count:,} parameters -> {files.model}")
    print("2/3  supervised cold start")
    weights = imitate(files, EXAMPLES / "tiny_cold_start.yaml", options.processes)
    print("3/3  GSPO: tensor, sequence, expert and data parallel")
    train(EXAMPLES / "tiny_gspo.yaml", options.processes, [f"run_dir={gspo}", f"model.path={weights}"])
    report(gspo, EXAMPLES / "tiny_gspo.yaml", time.monotonic() - started)


def report(run: Path, config: Path, seconds: float) -> None:
    """Score the export in Transformers, complete ``summary.json`` and print where everything lies."""
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    summary["demo_wall_seconds"] = seconds
    summary["accuracy_transformers"] = transformers_accuracy(run / "hf", config)
    file.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"""
held-out accuracy   {100 * summary["accuracy_before"]:.1f} % before GSPO, {100 * summary["accuracy_after"]:.1f} % after
                    ({100 * summary["accuracy_transformers"]:.1f} % in plain Transformers)
time                {seconds:.0f} s in all, {summary["wall_seconds"]:.0f} s of it GSPO
picture             {run / "curves.png"}
metrics             {run / "metrics.jsonl"}   summary: {file}
samples             {run / "samples"}
checkpoint          {run / "hf"}   (Hugging Face format)""")


if __name__ == "__main__":
    main()
