"""Run several algorithms from one cold start over several seeds, or take finished runs, and write one report.

    megatron-gspo compare COMPARISON.yaml [key=value ...] [--slots N] [--report-only]
    megatron-gspo compare --runs RUN_DIR RUN_DIR ... [--output FOLDER] [--baseline NAME]

A finished run is not run again; an interrupted one is resumed. docs/comparison.md describes the report.

example: megatron-gspo compare --runs runs/grpo runs/gspo --baseline grpo --output comparison
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import time
from pathlib import Path

from megatron_gspo.config import load_config
from megatron_gspo.errors import UserError, printable, report
from megatron_gspo.paths import path_argument
from megatron_gspo.tools.compare.cold_start import INSTRUCTION, imitate, write_demonstrations
from megatron_gspo.tools.compare.study import read_study, study_of
from megatron_gspo.tools.compare.study_files import write_report
from megatron_gspo.tools.compare.study_plan import (
    ColdStartFiles,
    Comparison,
    arguments_of,
    load_comparison,
    report_runs,
    search_runs,
)
from megatron_gspo.tools.compare.study_progress import Display
from megatron_gspo.tools.compare.study_runner import StaleRun, execute
from megatron_gspo.tracking.progress import format_time
from megatron_gspo.tracking.run_directory import write_atomically


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    try:
        if options.runs:
            study = study_of(options.runs, _command(*given), baseline=options.baseline)
            for note in study.notes:
                print(f"note: {note}", file=sys.stderr)
            folder = options.output or Path("comparison")
        elif options.config is None:
            print("megatron-gspo compare: give a comparison file, or run directories after --runs", file=sys.stderr)
            return 2
        else:
            comparison = load_comparison(options.config, options.overrides)
            folder = options.output or comparison.folder
            if not options.report_only:
                run_all(comparison, slots=options.slots, retry=options.retry_failed)
            study = read_study(comparison, _command(options.config, *options.overrides))
        for file in write_report(study, folder):
            print(file)
    except ImportError as error:
        fix = "" if "pip install" in str(error) else "; pip install 'megatron-gspo[plot]'"
        print(printable(f"megatron-gspo compare: {error}{fix}"), file=sys.stderr)
        return 2
    except UserError as error:
        return report(error)
    return 0


def run_all(comparison: Comparison, *, slots: int, retry: bool = False) -> None:
    """Cold start, search, then every run of the report; each part is skipped where it is done."""
    began = time.monotonic()
    prepare(comparison)
    trials = search_runs(comparison)
    expected = len(trials) + len(report_runs(comparison, {}))
    with Display(expected, slots) as display:
        if trials:
            execute(comparison, trials, slots=slots, watcher=display, retry=retry)
        chosen = read_study(comparison, "").chosen
        execute(comparison, report_runs(comparison, chosen), slots=slots, watcher=display, retry=retry)
    print(f"{expected} runs in {format_time(time.monotonic() - began)}", file=sys.stderr)


def prepare(comparison: Comparison) -> None:
    """Run the cold start if the comparison has one and it is not done yet.

    Raises StaleRun if it was done with other settings.
    """
    start = comparison.config.cold_start
    if start is None:
        return
    files, config = ColdStartFiles(comparison.folder), comparison.resolve_path(start.config)
    stamp, wanted = comparison.folder / "cold_start.json", dataclasses.asdict(start)
    if stamp.is_file():
        if json.loads(stamp.read_text()) != wanted:
            raise StaleRun(f"{stamp}: the cold start was made with other settings; choose another folder")
        return
    # imports torch and Transformers, which a report does not need
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    comparison.folder.mkdir(parents=True, exist_ok=True)
    count = write_tiny_model(files.model, TinyModel(**dataclasses.asdict(start.model)), words=[INSTRUCTION])
    print(f"cold start: a random Qwen3-MoE of {count:,} parameters learns from demonstrations", file=sys.stderr)
    runs = load_config(comparison.base_file, arguments_of(comparison.config.overrides))
    write_demonstrations(files, runs, mistakes=start.mistakes, copies=start.copies)
    imitate(files, config, start.processes, arguments_of(start.overrides))
    write_atomically(stamp, json.dumps(wanted, indent=2) + "\n")


def _command(*arguments: str) -> str:
    """The command that makes the same report."""
    return shlex.join(["megatron-gspo", "compare", *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", metavar="COMPARISON.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the comparison file, e.g. seeds=[1,2]")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="runs at once (default: cores)")
    parser.add_argument("--report-only", action="store_true", help="run nothing; report the runs that exist")
    parser.add_argument("--retry-failed", action="store_true", help="run failed runs again")
    parser.add_argument(
        "--runs", nargs="+", type=path_argument, metavar="RUN_DIR", help="finished runs to compare instead"
    )
    parser.add_argument("--baseline", help="with --runs: the variant that the others are compared with")
    parser.add_argument("--output", type=path_argument, help="folder of the report (default: the comparison's folder)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
