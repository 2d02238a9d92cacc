"""GPUs as data. Figures are the vendor's for the SXM board in a node of eight; memory is what the
driver reports.

Sources: NVIDIA A100, H100, H200, H20 and HGX B200 data sheets (dense bfloat16, that is without
sparsity; bandwidth of memory; NVLink is sold as the sum of both directions, half of it is used here); DGX A100, H100,
H200 and B200 user guides (one network adapter a GPU: 200 or 400 Gbit/s); memory from ``nvidia-smi``
on such machines, MiB.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from megatron_gspo.errors import InputError

GIB = 2**30
RUNTIME_BYTES = 3 * GIB  # of a GPU, that CUDA, NCCL and cuBLAS take; assumed


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node. Memory in bytes; flops: dense bfloat16 products a second; bandwidths in
    bytes a second, of its memory, of NVLink in one direction, and of this GPU's network adapter."""

    name: str
    memory: int
    flops: float
    bandwidth: float
    nvlink: float
    network: float
    node: int = 8


def _gpu(
    name: str, mib: int, teraflops: float, memory: float, nvlink: float, gigabits: float
) -> Gpu:
    return Gpu(name, mib * 2**20, teraflops * 1e12, memory * 1e9, nvlink * 1e9, gigabits * 1e9 / 8)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 40960, 312, 1555, 300, 200),
        _gpu("a100", 81920, 312, 2039, 300, 200),
        _gpu("h20", 97871, 148, 4000, 450, 400),
        _gpu("h100", 81559, 989.4, 3350, 450, 400),
        _gpu("h200", 143771, 989.4, 4800, 450, 400),
        _gpu("b200", 183359, 2250, 8000, 900, 400),
    )
}


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU that a driver names so, such as ``NVIDIA H100 80GB HBM3``; None for others, among
    them the slower boards for PCIe.
    """
    words = re.split(r"[ -]", name.lower())
    if {"pcie", "nvl"} & set(words):
        return None
    if "a100" in words and any(word.startswith("40gb") for word in words):
        return GPUS["a100-40gb"]
    return next((gpu for word, gpu in GPUS.items() if word in words), None)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name; ``InputError`` naming the known ones."""
    key = re.sub(r"(-sxm)?(-(80|141)(gb)?)?(-sxm)?$", "", name.lower().replace("_", "-"))
    if key in GPUS:
        return GPUS[key]
    close = difflib.get_close_matches(key, GPUS, n=1)
    hint = f", perhaps {close[0]}" if close else ""
    raise InputError(f"--gpu {name}: not a known GPU; give one of {', '.join(GPUS)}{hint}")
