"""``megatron-gspo rehearse CONFIG --world N``: a training step of each role of a cluster, on a
CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron_gspo.config import Config, load_config
from megatron_gspo.errors import InputError, UserError, report, writing
from megatron_gspo.gpus import GPUS, RUNTIME_BYTES, find_gpu
from megatron_gspo.paths import path_argument
from megatron_gspo.tools.one_line_parser import OneLineParser
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.rehearse.deadlock import compare_ranks
from megatron_gspo.tools.rehearse.rank_processes import RankJob, default_jobs, rehearse_ranks
from megatron_gspo.tools.rehearse.records import RankRecord
from megatron_gspo.tools.rehearse.roles import PlayedRank, choose_ranks
from megatron_gspo.tools.rehearse.summary import FailedRank, Rehearsal, problems, to_json
from megatron_gspo.tools.rehearse.text_report import whole_report
from megatron_gspo.tracking.progress import format_time

ABOUT = """Run the real training step of a config (log-probs, forward-backward, optimizer, weight export, plan of a
checkpoint) on this machine's CPU as if on a cluster, for one rank of each role, on tensors without data. Reported are
memory, time, collectives, host synchronizations and copies of each, and whether the ranks' collectives fit together.
Exit code: 0; 1 for what would stop or corrupt a run; 2 for invalid input."""
EXAMPLE = """example: megatron-gspo rehearse examples/qwen3_moe/qwen3_30b_a3b_4x8_gspo.yaml --world 16 --layers 4 \\
    model.path=examples/qwen3_moe/models/Qwen3-30B-A3B"""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    made = OneLineParser(
        prog="megatron-gspo rehearse",
        description=ABOUT,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("config", metavar="CONFIG", help="config file of the run")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the config")
    made.add_argument(
        "--world", type=int, required=True, metavar="N", help="number of GPUs that train"
    )
    made.add_argument(
        "--ranks",
        default="all-roles",
        help="all-roles (default), stages, all, or a list such as 0,5",
    )
    made.add_argument(
        "--layers",
        type=int,
        metavar="L",
        help="rehearse a model of so many layers (default: its own)",
    )
    made.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="tokens of the first expert rank, by its fair share (default: %(default)s)",
    )
    made.add_argument(
        "--gpu",
        default="h100",
        help=(
            "the GPU whose memory must suffice, and whose time is told:"
            f" {', '.join(GPUS)} (default: %(default)s)"
        ),
    )
    made.add_argument(
        "--jobs", type=int, metavar="J", help="ranks at a time (default: by cores and memory)"
    )
    made.add_argument(
        "--build-only",
        action="store_true",
        help="only check the config and its files, and build the model of each stage",
    )
    made.add_argument(
        "--times",
        action="store_true",
        help="print the time of every class of operations and of every call site",
    )
    made.add_argument(
        "--json", type=path_argument, metavar="FILE", help="write all that was recorded"
    )
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ``InputError`` for a value that no rehearsal has."""
    for name, least in (("world", 1), ("layers", 1), ("imbalance", 1.0), ("jobs", 1)):
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise InputError(f"--{name} {value:g}: must be at least {least:g}")


def build(args: argparse.Namespace) -> str:
    """``--build-only``: what each pipeline stage holds. Raises ``UserError``."""
    from megatron_gspo.tools.rehearse.build_only import build_stages, describe_stages

    check_arguments(args)
    config = load_config(args.config, args.overrides)
    return describe_stages(config, args.world, build_stages(config, args.world))


def rehearse(args: argparse.Namespace) -> Rehearsal:
    """Check the config, rehearse the ranks and compare them. Raises ``UserError``."""
    check_arguments(args)
    gpu = find_gpu(args.gpu)
    config: Config = load_config(args.config, args.overrides)
    config.check_sizes(args.world)
    played = choose_ranks(config.parallel, args.world, args.ranks)
    job = RankJob(args.config, tuple(args.overrides), args.world, args.layers, args.imbalance)
    with RankProgress(len(played)) as progress:
        records, failed = rehearse_ranks(job, played, args.jobs or default_jobs(), progress.ended)
    name = Path(args.config).stem + ("" if args.layers is None else f" with {args.layers} layers")
    layout = name_of(config.parallel)
    comparison = compare_ranks(records)
    return Rehearsal(
        name, args.world, layout, gpu, RUNTIME_BYTES, tuple(records), tuple(failed), comparison
    )


class RankProgress:
    """A bar over the ranks in a terminal, otherwise one line for each that ends, on standard
    error.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[line]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task("rehearsing", total=total, line=f"0/{total} ranks")

    def ended(self, played: PlayedRank, result: RankRecord | FailedRank) -> None:
        """A rank has its record, or failed."""
        self._done += 1
        outcome = (
            "failed"
            if isinstance(result, FailedRank)
            else format_time(sum(result.seconds.values()))
        )
        line = f"{self._done}/{self._total} ranks"
        if self._bar.disable:
            print(f"{line}: rank {played.rank} {outcome}", file=sys.stderr, flush=True)
        else:
            left = (time.monotonic() - self._start) / self._done * (self._total - self._done)
            line += f"  left {format_time(left)}" if left else ""
            self._bar.update(self._task, completed=self._done, line=line)

    def __enter__(self) -> RankProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 0, 1 where a run would stop or go wrong, 2 with one line for invalid
    input.
    """
    try:
        args = parser().parse_intermixed_args(arguments)
        if args.build_only:
            print(build(args))
            return 0
        rehearsal = rehearse(args)
        print(whole_report(rehearsal, all_times=args.times))
        if args.json:
            with writing(args.json):
                args.json.write_text(json.dumps(to_json(rehearsal), indent=1), encoding="utf-8")
    except UserError as error:
        return report(error)
    return 1 if problems(rehearsal) else 0


if __name__ == "__main__":
    raise SystemExit(main())
