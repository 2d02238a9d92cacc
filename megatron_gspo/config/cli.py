"""`CONFIG.yaml [key=value ...]` and `--help`, for every front door that takes a config."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron_gspo.config.config_error import MISSING, ConfigError
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.config.reference import help_text
from megatron_gspo.config.schema import Config, load_config

_SECONDS_TO_SPEAK = 10.0  # ranks start seconds apart on a busy machine


def from_command_line(arguments: Sequence[str], usage: str) -> Config:
    """The config that the arguments name.

    `--help` prints every key and exits with 0; a fault prints one line and exits with 2. Under torchrun only
    the first rank of a node prints.
    """
    speak = os.environ.get("LOCAL_RANK", "0") == "0"  # each node has its own files
    if any(argument in ("-h", "--help") for argument in arguments):
        if speak:
            print(help_text(Config, usage))
        raise SystemExit(0)
    try:
        return _load(arguments, usage)
    except ConfigError as error:
        refuse(error)


def refuse(error: ConfigError) -> NoReturn:
    """Print the one line, once a node, and exit with 2. The other ranks wait: torchrun ends all at the first exit."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"config error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_SECONDS_TO_SPEAK)
    raise SystemExit(2)


def _load(arguments: Sequence[str], usage: str) -> Config:
    if not arguments or "=" in arguments[0]:
        raise ConfigError("CONFIG.yaml", MISSING, "is missing", usage.splitlines()[0])
    overrides, for_servers = split_server_arguments(arguments[1:])
    return load_config(arguments[0], overrides, server_args=for_servers)
