"""Run variants of a config over several seeds, or take finished runs, and write one report.

    megatron-gspo compare COMPARISON.yaml [key=value ...] [--slots N] [--report-only]
    megatron-gspo compare --runs RUN_DIR RUN_DIR ... [--output FOLDER] [--baseline NAME]

A finished run is not run again; an interrupted one is resumed. docs/comparison.md describes the
file and the report.

example: megatron-gspo compare examples/qwen3_moe/compare_small.yaml
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from megatron_gspo.errors import UserError, printable, report
from megatron_gspo.paths import path_argument
from megatron_gspo.tools.compare.finished_runs import study_of_runs
from megatron_gspo.tools.compare.report import write_report
from megatron_gspo.tools.compare.study import read_study
from megatron_gspo.tools.compare.study_plan import Comparison, load_comparison, planned_runs
from megatron_gspo.tools.compare.study_runner import execute


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    try:
        if options.runs:
            command = shlex.join(["megatron-gspo", "compare", *given])
            study = study_of_runs(options.runs, command, baseline=options.baseline)
            folder = options.output
        elif options.config is None:
            print(
                "megatron-gspo compare: give a comparison file, or run directories after --runs",
                file=sys.stderr,
            )
            return 2
        else:
            comparison = load_comparison(options.config, options.overrides)
            if not options.report_only:
                run_all(comparison, slots=options.slots, retry=options.retry_failed)
            command = shlex.join(["megatron-gspo", "compare", options.config, *options.overrides])
            study = read_study(comparison, command)
            folder = comparison.folder
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
    """The cold start, then every run; what is done is skipped."""
    # imports torch and Transformers, which a report does not need
    from megatron_gspo.tools.compare.cold_start import prepare

    prepare(comparison)
    execute(comparison, planned_runs(comparison), slots=slots, retry=retry)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="COMPARISON.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="of the comparison file, e.g. seeds=[1,2]",
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at once (default: cores)",
    )
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="run nothing; report the runs that exist",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="run failed runs again",
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=path_argument,
        metavar="RUN_DIR",
        help="finished runs to compare instead",
    )
    parser.add_argument(
        "--baseline",
        help="with --runs: the variant that the others are compared with (default: the first)",
    )
    parser.add_argument(
        "--output",
        type=path_argument,
        default=Path("comparison"),
        help="with --runs: folder of the report (default: comparison)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
