"""``megatron-gspo doctor [CONFIG.yaml] [key=value ...]``; on all ranks by torchrun."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_gspo.errors import UserError, report
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor.options import Options

USAGE = "megatron-gspo doctor [CONFIG.yaml] [key=value ...] [options]"
ABOUT = """Check the installed versions and, with a config, what the run needs: the config, model, prompts,
known issues, servers and, under torchrun, one exchange on each process group. Writes nothing to run_dir.
Exit code: 0 nothing worse than a note, 1 warnings, 2 errors."""
EXAMPLE = """example: megatron-gspo doctor CONFIG.yaml --world-size 8
on all ranks: torchrun --nproc-per-node 8 -m megatron_gspo.tools.doctor CONFIG.yaml"""


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        "megatron-gspo doctor",
        USAGE,
        ABOUT,
        EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--allow-warnings",
        action="store_true",
        help="exit with 0 if nothing is worse than a warning",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit for the ranks to meet, and for an exchange on each group (default: 60)",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="check the config for N processes without starting them",
    )
    known, rest = parser.parse_known_args(arguments)
    if not 0 < known.timeout < math.inf or (known.world_size is not None and known.world_size < 1):
        parser.error("--timeout and --world-size must be positive and finite")
    config = rest[0] if rest and "=" not in rest[0] and not rest[0].startswith("-") else ""
    overrides = rest[1:] if config else rest
    for_servers = tuple(f"--{engine}." for engine in SERVER_KINDS)
    for word in overrides:
        if word.startswith("-") and not word.startswith(for_servers):
            parser.error(f"{word}: no such option")
    if overrides and not config:
        parser.error(f"{overrides[0]}: an override needs a CONFIG.yaml before it")
    return Options(
        config,
        tuple(overrides),
        allow_warnings=known.allow_warnings,
        seconds=known.timeout,
        world_size=known.world_size,
    )


def check(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print the report and return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        from megatron_gspo.tools.doctor.checks import run_checks
        from megatron_gspo.tools.doctor.findings import quiet_output
    except ImportError as failure:  # a required package is missing
        print(
            f"error    versions.packages  {failure}; the doctor needs it too; install this project "
            "with pip, which installs its requirements",
            file=sys.stderr,
        )
        return 2
    output = sys.stdout
    try:
        with quiet_output():
            return run_checks(options, output)
    except UserError as failure:
        return report(failure)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """``check``, then end the process without joining threads: those of process groups with lost
    peers may never end."""
    code = check(arguments)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
