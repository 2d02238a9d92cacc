"""Kernels over rows in Triton, for what costs a GPU several passes over memory in plain torch.

``operators.py`` has them as operators of torch, with shapes for fake tensors and gradients. Each
file besides it is one kernel, and imports Triton. A caller has the same in plain torch, and asks
``row_kernels_apply``. Kernels compute in float32, and add up in a fixed order: the same inputs give
the same bits. Matrix products are torch's.
"""

import importlib.util
import logging
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron_gspo.errors import InputError

SWITCH = "MEGATRON_GSPO_KERNELS"
"""Environment variable: 0 turns the kernels off; names with a minus, as in -adam,-logits, these."""

NAMES = (
    "adam",
    "embedding_gradient",
    "expert_gradients",
    "gated_unit",
    "logits",
    "rotated_heads",
    "row_copies",
)
"""What can be turned off: a file each, and the three of a tile of logits, which share buffers."""

_DTYPES = (torch.bfloat16, torch.float32)


def row_kernels_apply(x: Tensor, name: str) -> bool:
    """Whether the kernels of a name take ``x``: they are on, and it is bfloat16 or float32 on a GPU
    that Triton can compile for.
    """
    return x.is_cuda and x.dtype in _DTYPES and name not in turned_off() and can_compile()


def turned_off() -> frozenset[str]:
    """The names that ``SWITCH`` turns off.

    Raises InputError for a value that is neither 0 nor 1 nor names with a minus.
    """
    return _names_in(os.environ.get(SWITCH, "1"))


@cache
def _names_in(value: str) -> frozenset[str]:
    if value in ("0", "1"):
        return frozenset(NAMES if value == "0" else ())
    names = value.split(",")
    if not all(name.startswith("-") and name[1:] in NAMES for name in names):
        known = ",".join(f"-{name}" for name in NAMES)
        raise InputError(f"{SWITCH}={value}: not known; set it to 0, 1 or some of {known}")
    return frozenset(name[1:] for name in names)


@cache
def can_compile() -> bool:
    """Whether Triton is there with what it needs of the system.

    A CUDA build of torch brings Triton, but no C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler and headers.is_file():
        return True
    lacking = headers if compiler else "gcc or clang"
    logging.getLogger(__name__).warning(
        f"Triton can't compile without {lacking}, so slower code of torch runs: install it"
        f" (python3-dev and gcc on Debian), or set {SWITCH}=0"
    )
    return False
