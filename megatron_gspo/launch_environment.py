"""The environment variables that number the processes of a run, which torchrun, a pod or a job sets,
and those of the processes that a run starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_gspo.errors import InputError
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

# torchrun takes defaults of its own options from PET_*, which Kubeflow sets in each pod
_VARIABLES = re.compile(
    r"TORCHELASTIC_\w+|PET_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)


def is_torchruns() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def without_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is none of the run's."""
    return {name: value for name, value in environment.items() if not _VARIABLES.fullmatch(name)}


def own_import_path() -> dict[str, str]:
    """The variable by which a Python process that is started imports what this one can."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_alone() -> None:
    """Make this process a command of one process, unless torchrun has started it.

    A pod of a PyTorchJob has RANK and WORLD_SIZE for whatever runs in it: a conversion would wait
    for other ranks.
    """
    if is_torchruns():
        return
    kept = without_launch_variables(os.environ)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes of the run. Raises ``InputError``."""
    return _number_of_processes("WORLD_SIZE", environment.get("WORLD_SIZE", "1"))


def local_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes of the run on each node: torchrun's ``LOCAL_WORLD_SIZE``, else all, on
    one node. Raises ``InputError``.
    """
    if (given := environment.get("LOCAL_WORLD_SIZE")) is None:
        return world_size(environment)
    return _number_of_processes("LOCAL_WORLD_SIZE", given)


def _number_of_processes(name: str, given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise InputError(
            f"{name}={given!r} in the environment: is not a number of processes; correct it"
        )
    return int(given)


def tell_torchrun(line: str) -> None:
    """Leave the line to torchrun, which ends its own report of a failed process with it; else
    nothing is done.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    content = {"message": {"message": line, "extraInfo": extra}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(content), encoding="utf-8")


def warn_of_ignored_processes() -> None:
    """One line where the environment names several processes, for a command that trains in one."""
    given = os.environ.get("WORLD_SIZE", "1")
    if given != "1" and not is_torchruns():
        logger.warning(
            f"WORLD_SIZE={given} of the environment is ignored: megatron-gspo train is one process;"
            " start each of several with torchrun -m megatron_gspo.train, or with python -m"
            " megatron_gspo.train"
        )
