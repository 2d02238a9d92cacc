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

SWITCH = "MEGATRON_GSPO_KERNELS"
"""Environment variable: 0 turns the kernels off."""

_DTYPES = (torch.bfloat16, torch.float32)


def row_kernels_apply(x: Tensor) -> bool:
    """Whether the kernels take ``x``: bfloat16 or float32 on a GPU that Triton can compile for."""
    return x.is_cuda and x.dtype in _DTYPES and can_compile()


def are_on() -> bool:
    """Whether the kernels are wanted."""
    return os.environ.get(SWITCH) != "0"


@cache
def can_compile() -> bool:
    """Whether the kernels are on, and Triton is there with what it needs of the system.

    A CUDA build of torch brings Triton, but no C compiler.
    """
    if not are_on() or importlib.util.find_spec("triton") is None:
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
