"""The console command: ``megatron-gspo COMMAND [arguments]``, also ``python -m megatron_gspo
COMMAND [arguments]``.

Each command is one row of ``COMMANDS`` and one module with ``main(arguments)``, which parses its
own arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megatron_gspo import PROGRAM, __version__
from megatron_gspo.launch_environment import run_alone, warn_of_ignored_processes
from megatron_gspo.terminal import outlive_terminal


class Command(NamedTuple):
    """A subcommand. module: imported on use; its ``main(arguments)`` returns an exit code or None,
    or raises ``SystemExit``. summary: its line in ``megatron-gspo --help``."""

    module: str
    summary: str


COMMANDS = {
    "train": Command(
        "megatron_gspo.train",
        "train a model (one process; torchrun -m megatron_gspo.train for several)",
    ),
    "demo": Command(
        "megatron_gspo.tools.demo", "train a small model on this machine's CPU from nothing"
    ),
    "plan": Command(
        "megatron_gspo.tools.plan.__main__", "rank parallel layouts, and rehearse the best"
    ),
    "rehearse": Command(
        "megatron_gspo.tools.rehearse.__main__", "rehearse a cluster's training step on a CPU"
    ),
    "doctor": Command(
        "megatron_gspo.tools.doctor.__main__",
        "check versions, config, servers and ranks before a run",
    ),
    "convert": Command(
        "megatron_gspo.tools.convert.__main__",
        "convert checkpoints between Hugging Face and Megatron",
    ),
    "compare": Command(
        "megatron_gspo.tools.compare.__main__", "compare algorithms over seeds, or finished runs"
    ),
    "evaluate": Command(
        "megatron_gspo.tools.evaluate.__main__", "evaluate a model, a run or servers on task files"
    ),
    "serve": Command("megatron_gspo.tools.serve", "start SGLang or vLLM servers on this machine"),
    "examples": Command(
        "megatron_gspo.tools.copy_examples",
        "copy the example configs and launch scripts to a folder",
    ),
}


def help_text() -> str:
    """What ``--help`` prints: usage and one line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [arguments]",
            "",
            *lines,
            "",
            (
                f"{PROGRAM} COMMAND --help describes a command, with an example; {PROGRAM}"
                " --version prints the version."
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Prints the list of commands and returns 2 for an unknown one.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    name = given[0]
    rest = given[1:]
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"{PROGRAM}: {name!r} is not a command; use one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    outlive_terminal()
    if name == "train":
        warn_of_ignored_processes()
    run_alone()
    try:
        return import_module(COMMANDS[name].module).main(rest) or 0
    except KeyboardInterrupt:  # a command that has something to keep or to end says so itself
        print(f"{PROGRAM} {name}: interrupted", file=sys.stderr)
        return 130
