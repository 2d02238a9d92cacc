"""A parser of command lines whose refusals are one line, as those of every other input."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron_gspo.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """Raises ``InputError`` for wrong arguments, in place of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")
