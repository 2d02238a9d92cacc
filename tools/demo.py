"""Train a small Qwen3-MoE on this machine's CPU: supervised start, then GSPO on four processes, then a summary.

    megatron-gspo demo [--folder runs/demo] [--processes 4]

Both runs are ordinary ``torchrun -m megatron_gspo.train CONFIG`` runs of configs in examples/qwen3_moe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.given_names import is_real_folder
from megatron_gspo.tools.compare.study_plan import ColdStartFiles
from megatron_gspo.tools.copy_examples import EXAMPLE_RUNS

COLD_START, GSPO = EXAMPLE_RUNS / "tiny_cold_start.yaml", EXAMPLE_RUNS / "tiny_gspo.yaml"


def transformers_accuracy(model: Path, config: Path) -> float:
    """Held-out accuracy of an exported checkpoint with Transformers' own ``generate``, sampled at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_gspo.config import load_config
    from megatron_gspo.tools.compare.cold_start import held_out_and_training

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    run = load_config(config)
    held_out, _ = held_out_and_training(model, run)
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


def run_demo(folder: Path, processes: int, overrides: Sequence[str] = ()) -> None:
    """Write a random model and demonstrations to ``folder``, train it twice and print a summary.

    An earlier demo in the folder is replaced.
    overrides: ``key=value`` of both training configs. Raises InputError for a folder that holds something else,
    SystemExit with torchrun's exit code if a run fails.
    """
    from transformers.utils.logging import disable_progress_bar

    from megatron_gspo.config import load_config
    from megatron_gspo.tools.compare.cold_start import INSTRUCTION, imitate, train, write_demonstrations
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    disable_progress_bar()
    started = time.monotonic()
    files, gspo = ColdStartFiles(folder), folder / "gspo"
    _remove_earlier_demo(files, gspo)
    count = write_tiny_model(files.model, TinyModel(expert_width=64), words=[INSTRUCTION])
    write_demonstrations(files, load_config(GSPO))
    print(f"1/3  random Qwen3-MoE, {count:,} parameters: {files.model}", flush=True)
    print("2/3  supervised start on demonstrations with mistakes", flush=True)
    weights = imitate(files, COLD_START, processes, overrides)
    print("3/3  GSPO with tensor, sequence, expert and data parallelism", flush=True)
    train(GSPO, processes, [*overrides, f"run_dir={gspo}", f"model.path={weights}"])
    print_summary(gspo, time.monotonic() - started)


def _remove_earlier_demo(files: ColdStartFiles, gspo: Path) -> None:
    """Remove what a demo writes, if one has written to the folder."""
    folder = files.folder
    if folder.exists() and not (folder.is_dir() and (files.demonstrations.is_file() or not any(folder.iterdir()))):
        raise InputError(f"--folder {folder}: is not empty and holds no demo; choose another folder")
    for path in (files.model, files.held_out, files.run_dir, gspo, files.demonstrations):
        if is_real_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def print_summary(run: Path, seconds: float) -> None:
    """Evaluate the exported model in Transformers, add the results to ``summary.json`` and print them."""
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    summary["demo_wall_seconds"] = seconds
    summary["accuracy_transformers"] = transformers_accuracy(run / "hf", GSPO)
    file.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"""
held-out accuracy   {100 * summary["accuracy_before"]:.1f} % before GSPO, {100 * summary["accuracy_after"]:.1f} % after
                    ({100 * summary["accuracy_transformers"]:.1f} % in Transformers)
time                {seconds:.0f} s in total, GSPO {summary["wall_seconds"]:.0f} s
curves              {run / "curves.png"}
metrics             {run / "metrics.jsonl"}   summary: {file}
samples             {run / "samples"}
checkpoint          {run / "hf"}   (Hugging Face format)""")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, torchrun's where a run failed, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="megatron-gspo demo",
        description="Train a small Qwen3-MoE on this machine's CPU: supervised start, then GSPO. About 5 minutes.",
        epilog="example: megatron-gspo demo --folder runs/demo",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of both training configs, e.g. training.steps=10"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo"), help="output, replaces an earlier demo (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=4, help="a multiple of 2: the layout is TP 2, EP 2 (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        run_demo(options.folder, options.processes, options.overrides)
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
