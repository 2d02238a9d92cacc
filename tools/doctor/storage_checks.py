"""Disk and shared memory: free space compared with what a run writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_gspo.config import Config
from megatron_gspo.errors import existing_part, show_bytes
from megatron_gspo.given_names import CHECKPOINTS
from megatron_gspo.models import ModelShape
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok, warning
from megatron_gspo.tools.doctor.disk_space import DTYPE_BYTES, Needs, needs
from megatron_gspo.tools.plan.adapters import total_adapters
from megatron_gspo.tools.plan.parameters import total_parameters

SHARED_MEMORY = Path("/dev/shm")
# Containers have 64 MiB by default, which is too little for NCCL and servers; NVIDIA starts its own with 1 GiB.
_SHARED_MEMORY_OF_A_RANK = 256 << 20
_LITTLE = 1 << 30  # bytes; below it is a warning, without a config


def needs_of(config: Config, shape: ModelShape) -> Needs:
    """What a run of this config writes to its run_dir; weights for servers only if ``weight_dir`` is inside."""
    inside = config.servers.weight_dir is None or Path(config.servers.weight_dir).is_relative_to(config.run_dir)
    copies = 2 if config.rollout.engine in SERVER_KINDS and config.servers.weight_transport == "disk" and inside else 0
    return needs(
        total_parameters(shape),
        weight_bytes=DTYPE_BYTES[config.model.dtype],
        keep=config.checkpoint.keep,
        saves=bool(config.checkpoint.save_interval),
        exports=config.checkpoint.export_hf,
        weight_copies=copies,
        adapters=None if config.trained_lora is None else total_adapters(shape, config.trained_lora),
    )


def check_run_disk(config: Config, shape: ModelShape) -> list[Finding]:
    """The disk of run_dir. What the same run has written there already counts as available."""
    folder = Path(config.run_dir)
    checkpoints = CHECKPOINTS.entries(folder / "checkpoints").values()
    used = sum(_size(path) for path in (*checkpoints, folder / "hf", folder / "weights"))
    return [judge_disk(config.run_dir, shutil.disk_usage(existing_part(folder)).free, used, needs_of(config, shape))]


def check_weight_disk(config: Config, shape: ModelShape) -> list[Finding]:
    """The disk of ``weight_dir`` outside of run_dir: space for two copies of the weights."""
    folder = config.servers.weight_dir
    if config.servers.weight_transport != "disk" or folder is None or Path(folder).is_relative_to(config.run_dir):
        return []
    wanted = 2 * total_parameters(shape) * DTYPE_BYTES[config.model.dtype]
    free = shutil.disk_usage(existing_part(folder)).free + _size(Path(folder))
    text = f"{folder}: {show_bytes(free)} free, two copies of the weights take {show_bytes(wanted)}"
    if free < wanted:
        return [
            error(
                "disk.weight_dir",
                text,
                "the weight updates would fail",
                f"free some space or set another {config.servers.section}.weight_dir",
            )
        ]
    return [ok("disk.weight_dir", text)]


def judge_disk(folder: str, free: int, used: int, wanted: Needs) -> Finding:
    """Compare free bytes and bytes already used by this run with what it writes in all."""
    check, available = "disk.run_dir", free + used
    parts = []
    if wanted.checkpoints:
        parts.append(f"{wanted.checkpoints} checkpoints of {show_bytes(wanted.checkpoint)}")
    if wanted.export:
        parts.append(f"an export of {show_bytes(wanted.export)}")
    if wanted.weights:
        parts.append(f"weights for servers of {show_bytes(wanted.weights)}")
    text = f"{folder}: {show_bytes(free)} free, the run writes {' and '.join(parts) or 'metrics and samples only'}"
    if available < wanted.smallest:
        return error(
            check,
            text,
            "it stops at the first file that doesn't fit",
            f"free {show_bytes(wanted.total - available)}, or choose another run_dir",
        )
    if available < wanted.total:
        return warning(
            check,
            text,
            "it will not all fit",
            f"free {show_bytes(wanted.total - available)}, lower checkpoint.keep, or choose another run_dir",
        )
    return ok(check, text)


def check_free_disk() -> list[Finding]:
    """Without a config: the disks of the working directory and of temporary files."""
    import tempfile

    found = []
    for name, folder in (("working_directory", os.getcwd()), ("temporary", tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        text = f"{folder}: {show_bytes(free)} free"
        little = warning(f"disk.{name}", text, "checkpoints and logs need space", "free some space")
        found.append(little if free < _LITTLE else ok(f"disk.{name}", text))
    return found


def check_shared_memory(ranks: int, *, gpu: bool) -> list[Finding]:
    """The shared memory of this machine. ranks: processes of this run on it, as far as known."""
    if not SHARED_MEMORY.is_dir():
        return [
            note(
                "disk.shared_memory",
                f"there is no {SHARED_MEMORY}",
                "NCCL and SGLang use it between the GPUs of a machine",
                "mount a tmpfs there",
            )
        ]
    usage = shutil.disk_usage(SHARED_MEMORY)
    return [judge_shared_memory(usage.free, usage.total, ranks, gpu=gpu)]


def judge_shared_memory(free: int, total: int, ranks: int, *, gpu: bool) -> Finding:
    """NCCL uses shared memory between GPUs without peer-to-peer access, SGLang between its processes. In bytes."""
    check, wanted = "disk.shared_memory", ranks * _SHARED_MEMORY_OF_A_RANK
    text = f"{SHARED_MEMORY}: {show_bytes(free)} of {show_bytes(total)} free"
    if not gpu:
        return ok(check, text + ", not needed without GPUs")
    if free >= wanted:
        return ok(check, f"{text}, {show_bytes(wanted)} is enough for {ranks} GPUs")
    return warning(
        check,
        f"{text}, {show_bytes(wanted)} is usual for {ranks} GPUs",
        "NCCL and SGLang fail with 'no space left on device' or a bus error when it runs out",
        "start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)",
    )


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:  # a running job removes old files
        return 0
