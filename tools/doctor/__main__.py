"""``megatron-gspo doctor [CONFIG.yaml] [key=value ...]``; on all ranks by torchrun."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor.arguments import Options

USAGE = "megatron-gspo doctor [CONFIG.yaml] [key=value ...] [--json] [--probe]"
ABOUT = """Check this machine and, with a config, what the run needs: versions, known issues, the config,
model, prompts, disk, ports, servers and, under torchrun, the ranks and their process groups. Writes nothing to run_dir.
Exit code: 0 nothing worse than a note, 1 warnings, 2 errors."""
EXAMPLE = """example: megatron-gspo doctor CONFIG.yaml --world-size 8
on all ranks: torchrun --nproc-per-node 8 -m megatron_gspo.tools.doctor CONFIG.yaml"""


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        "megatron-gspo doctor", USAGE, ABOUT, EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="build the run and compare the log-probs of trainer and engine; "
        "sends the model's weights to the SGLang servers",
    )
    parser.add_argument("--allow-warnings", action="store_true", help="exit with 0 if nothing is worse than a warning")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit of the rendezvous, and of the collectives on all groups (default: 60)",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="check the config for N processes without starting them"
    )
    known, rest = parser.parse_known_args(arguments)
    if not 0 < known.timeout < math.inf or (known.world_size is not None and known.world_size < 1):
        parser.error("--timeout and --world-size must be positive and finite")
    config = rest[0] if rest and "=" not in rest[0] and not rest[0].startswith("-") else ""
    overrides = rest[1:] if config else rest
    for_servers = tuple(f"--{engine}." for engine in SERVER_KINDS)
    if unknown := [word for word in overrides if word.startswith("-") and not word.startswith(for_servers)]:
        parser.error(f"{unknown[0]}: no such option")
    if overrides and not config:
        parser.error(f"{overrides[0]}: an override needs a CONFIG.yaml before it")
    return Options(
        config,
        tuple(overrides),
        as_json=known.json,
        probe=known.probe,
        allow_warnings=known.allow_warnings,
        seconds=known.timeout,
        world_size=known.world_size,
    )


def check(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print the report and return the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        from megatron_gspo.tools.doctor.diagnostics import quiet_output
        from megatron_gspo.tools.doctor.runner import CheckRunner
    except ImportError as failure:  # a required package is missing
        print(
            f"error    versions.packages  {failure}; the doctor needs it too; install this project with pip, "
            "which installs its requirements",
            file=sys.stderr,
        )
        return 2
    runner = CheckRunner(options, output=sys.stdout)
    try:
        with quiet_output():
            return runner.run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """``check``, then end the process without joining threads: threads of process groups with lost peers may never
    end."""
    code = check(arguments)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
