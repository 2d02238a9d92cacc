"""Train a small Qwen3-MoE on this machine's CPU: supervised start, then GSPO on four processes,
then a summary.

    megatron-gspo demo [key=value ...] [--folder runs/demo] [--processes 4]

Both runs are ordinary ``torchrun -m megatron_gspo.train CONFIG`` runs of configs in
examples/qwen3_moe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gspo import PROGRAM
from megatron_gspo.config import ConfigError, load_config
from megatron_gspo.config.load import read_file
from megatron_gspo.config.parallel_checks import check_layout
from megatron_gspo.config.training_checks import check_batches
from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.given_names import is_real_folder
from megatron_gspo.tools.compare.study_plan import ColdStartFiles
from megatron_gspo.tools.compare.study_runner import Interrupted
from megatron_gspo.tools.copy_examples import EXAMPLE_RUNS
from megatron_gspo.tracking.run_environment import program

COLD_START = EXAMPLE_RUNS / "tiny_cold_start.yaml"
GSPO = EXAMPLE_RUNS / "tiny_gspo.yaml"
# What the demo sets itself: one run begins with the other's files, and its end reads the exported
# model.
OWN_KEYS = ("run_dir", "model.path", "data.prompts", "data.eval_prompts", "checkpoint.export_hf")
WARMUP = "optimizer.lr_warmup_steps"
_MARK = "demonstrations.jsonl"  # in a folder that a demo wrote


class DemoError(InputError):
    """Arguments that the demo can't run with."""

    label = "demo error"


def transformers_accuracy(model: Path, config: Path) -> float:
    """Held-out accuracy of an exported checkpoint with Transformers' own ``generate``, sampled
    at temperature 1.
    """
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
    texts = tokenizer.batch_decode(
        output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    answers = [prompt.answer for prompt in held_out for _ in range(run.evaluation.n_samples)]
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(
        texts
    )


def check_arguments(
    folder: Path, processes: int, overrides: Sequence[str]
) -> dict[Path, list[str]]:
    """The overrides of each training config, with a warm-up that fits into fewer steps. Raises
    UserError for what can't run, before anything is written or replaced."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in OWN_KEYS or key == "model":
            raise DemoError(
                f"{key}: the demo sets it itself; train with your own: {program()} train"
                " CONFIG.yaml"
            )
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"--folder {folder}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise DemoError(f"--folder {folder}: is not empty and holds no demo; choose another folder")
    if processes < 1:
        raise DemoError(f"--processes {processes}: at least 2 are needed, for TP 2 and EP 2")
    return {config: _checked(config, processes, overrides) for config in (COLD_START, GSPO)}


def _checked(file: Path, processes: int, overrides: Sequence[str]) -> list[str]:
    fitting = [*_short_warmup(file, overrides), *overrides]
    config = load_config(file, fitting)
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    try:
        check_layout(config.parallel, processes)
    except ConfigError as error:
        raise DemoError(f"--processes {processes}: {error}") from None
    check_batches(config.training, config.parallel, longest, processes)
    return fitting


def _short_warmup(file: Path, overrides: Sequence[str]) -> list[str]:
    """The override that halves a run's optimizer steps between warm-up and the rest, if the file's
    warm-up is longer than them."""
    warmup = read_file(file)["optimizer"]["lr_warmup_steps"]
    without = load_config(file, [f"{WARMUP}=0", *overrides])
    if without.optimizer.lr_warmup_steps or warmup < without.optimizer_steps:
        return []
    return [f"{WARMUP}={without.optimizer_steps // 2}"]


def run_demo(folder: Path, processes: int, overrides: Sequence[str] = ()) -> None:
    """Write a random model and demonstrations to ``folder``, where an earlier demo is replaced;
    train it twice and print a summary.

    overrides: ``key=value`` of both training configs. Raises SystemExit with torchrun's exit code
    if a run fails.
    """
    given = check_arguments(folder, processes, overrides)
    # torch and Transformers, which --help and a wrong argument don't need
    from transformers.utils.logging import disable_progress_bar

    from megatron_gspo.tools.compare.cold_start import (
        INSTRUCTION,
        imitate,
        train,
        write_demonstrations,
    )
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    disable_progress_bar()
    started = time.monotonic()
    files = ColdStartFiles(folder)
    gspo = folder / "gspo"
    _remove_earlier_demo(files, gspo)
    count = write_tiny_model(files.model, TinyModel(expert_width=64), words=[INSTRUCTION])
    write_demonstrations(files, load_config(GSPO, given[GSPO]))
    print(f"1/3  random Qwen3-MoE, {count:,} parameters: {files.model}", flush=True)
    print("2/3  supervised start on demonstrations with mistakes", flush=True)
    weights = imitate(files, COLD_START, processes, given[COLD_START])
    print("3/3  GSPO with tensor, sequence, expert and data parallelism", flush=True)
    train(GSPO, processes, [*given[GSPO], f"run_dir={gspo}", f"model.path={weights}"])
    print_summary(gspo, time.monotonic() - started)


def _remove_earlier_demo(files: ColdStartFiles, gspo: Path) -> None:
    """Remove what an earlier demo wrote to the folder, and nothing else."""
    for path in (files.model, files.held_out, files.run_dir, gspo, files.demonstrations):
        if is_real_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def print_summary(run: Path, seconds: float) -> None:
    """Evaluate the exported model in Transformers, add the results to ``summary.json`` and
    print them.
    """
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    summary["demo_wall_seconds"] = seconds
    summary["accuracy_transformers"] = transformers_accuracy(run / "hf", GSPO)
    file.write_text(json.dumps(summary, indent=2) + "\n")
    before, after = (
        "not measured" if summary[name] is None else f"{100 * summary[name]:.1f} %"
        for name in ("accuracy_before", "accuracy_after")
    )
    print(f"""
held-out accuracy   {before} before GSPO, {after} after
                    ({100 * summary["accuracy_transformers"]:.1f} % in Transformers)
time                {seconds:.0f} s in total, GSPO {summary["wall_seconds"]:.0f} s
curves              {run / "curves.png"}
metrics             {run / "metrics.jsonl"}   summary: {file}
samples             {run / "samples"}
checkpoint          {run / "hf"}   (Hugging Face format)

next                {program()} evaluate {run}   (the accuracy again, with intervals and pass@k)
                    {program()} plan --help   ({program()} --help lists the commands)""")
    activate = Path(program()).with_name("activate")
    if activate.is_file():
        print(f"                    source {activate}   (from then on the shell finds {PROGRAM})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, torchrun's where a run failed, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="megatron-gspo demo",
        description=(
            "Train a small Qwen3-MoE on this machine's CPU: supervised start, then GSPO. About 5"
            " minutes."
        ),
        epilog=(
            "example: megatron-gspo demo --folder runs/demo. To see its output only: megatron-gspo"
            " demo training.steps=10 --processes 2; these are too few steps to learn the task."
        ),
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of both training configs, e.g. training.steps=10",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/demo"),
        help="output; an earlier demo is replaced (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=4,
        help="a multiple of 2: the layout is TP 2, EP 2 (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        run_demo(options.folder, options.processes, options.overrides)
    except Interrupted as error:
        print(
            f"demo: interrupted; {options.folder} stays until the same command begins again",
            file=sys.stderr,
        )
        return error.exit_code
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
