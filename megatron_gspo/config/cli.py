"""`CONFIG.yaml [key=value ...]` and `--help`, for every command that takes a config."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_gspo.config.config_error import MISSING, ConfigError
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.config.reference import help_text
from megatron_gspo.config.schema import Config, load_config
from megatron_gspo.errors import report
from megatron_gspo.launch_environment import tell_torchrun

_PRINT_GRACE = 10.0  # seconds; ranks start seconds apart on a busy machine


def from_command_line(arguments: Sequence[str], usage: str) -> Config:
    """The config that the arguments name.

    `--help` prints every key and exits with 0; an error prints one line and exits with 2. Under
    torchrun only the first rank of a node prints.
    """
    prints = os.environ.get("LOCAL_RANK", "0") == "0"  # each node has its own files
    if any(argument in ("-h", "--help") for argument in arguments):
        if prints:
            print(help_text(Config, usage))
        raise SystemExit(0)
    try:
        return _load(arguments, usage)
    except ConfigError as error:
        refuse(error)


def refuse(error: ConfigError) -> NoReturn:
    """Print the line, once per node, and exit with 2.

    The other ranks wait: torchrun ends all at the first exit.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_torchrun(f"{error.label}: {error}")
        report(error)
    else:
        time.sleep(_PRINT_GRACE)
    raise SystemExit(error.exit_code)


def _load(arguments: Sequence[str], usage: str) -> Config:
    if not arguments or "=" in arguments[0]:
        raise ConfigError("CONFIG.yaml", MISSING, "is missing", usage.splitlines()[0])
    overrides, for_servers = split_server_arguments(arguments[1:])
    return load_config(arguments[0], overrides, server_args=for_servers)
