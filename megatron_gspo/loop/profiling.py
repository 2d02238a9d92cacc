"""Profiles of steps on request, and what is said where memory runs out (docs/profiling.md)."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from megatron_gspo.config import ProfileConfig
from megatron_gspo.errors import RunError, first_line, show_bytes, writing
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.policy_tensors import gradients, optimizer_states, weights
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_MEMORY_EVENTS = 100_000  # of a step, that the snapshot keeps
_LARGEST = 3  # tensors of the line
_ON_A_CPU = "DefaultCPUAllocator"
# Parts of the package, and what makes their tensors smaller; the innermost one that runs counts.
_PACKED = "lower training.max_tokens_per_micro_batch or set model.recompute_granularity: full"
_REMEDIES = (
    (
        "parallel",
        "set training.log_prob_memory_gib: 0.25 or lower training.max_tokens_per_micro_batch",
    ),
    ("rollout", "lower rollout.max_batch_size"),
    ("weight_transport", "lower weight_bucket_mb of the servers"),
    ("mcore", _PACKED),
)


class Profiler:
    """Records the steps of ``profile`` on this rank, and the next whole one after SIGUSR2."""

    def __init__(self, config: ProfileConfig, run_dir: str | Path) -> None:
        self._folder = Path(run_dir) / "profile"
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._steps = set(config.steps) if self._rank in config.ranks else set()
        self._requested = threading.Event()

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """Within the context SIGUSR2 requests a profile; not outside the main thread, where Python
        handles no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGUSR2, lambda *_: self._requested.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR2, before)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block, if step (counted from 1) is to be recorded."""
        if step not in self._steps and not self._requested.is_set():
            yield
            return
        self._requested.clear()
        trace = self._folder / f"step_{step:06d}_rank_{self._rank}.json.gz"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        try:
            with torch.profiler.profile(
                activities=activities, record_shapes=True, profile_memory=True
            ) as profile:
                yield
            with writing(trace):
                profile.export_chrome_trace(str(trace))
            snapshot = write_snapshot(trace.with_name(trace.name.replace(".json.gz", ".pickle")))
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
        files = trace if snapshot is None else f"{trace}, {snapshot}"
        logger.info(f"profile of step {step} on rank {self._rank}: {files}")


def write_snapshot(file: Path) -> Path | None:
    """Write the state of the GPU's allocator, with its history if that is recorded; returns the
    file, or None without a GPU.
    """
    if not torch.cuda.is_available():
        return None
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
    return file


@contextmanager
def out_of_memory_explained(policy: Policy, run_dir: str | Path) -> Iterator[None]:
    """Turn torch's error where memory runs out into one line with the largest tensors and the key
    that shrinks them; on a GPU with a snapshot of its memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _ON_A_CPU not in str(error):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        line = f"out of memory: {first_line(error).removeprefix('CUDA out of memory. ')}"
        line += f" The largest tensors are {', '.join(largest_tensors(policy))};"
        line += f" {_remedy(error)}"
        with suppress(RunError):  # the disk is full too
            snapshot = write_snapshot(Path(run_dir) / f"profile/out_of_memory_rank_{rank}.pickle")
            if snapshot is not None:
                line += f"; {snapshot} has all of it"
        raise RunError(line) from error


def largest_tensors(policy: Policy) -> list[str]:
    """The largest storages of tensors that Python holds on the policy's device, each as what it is
    and its size."""
    names: dict[int, str] = {}
    for trained in policy.trained.values():
        for name, tensors in (
            ("weights", weights(trained.chunks)),
            ("gradients", gradients(trained.chunks)),
            ("optimizer state", optimizer_states(trained.chunks, trained.optimizer)),
        ):
            names |= {tensor.untyped_storage()._cdata: name for tensor in tensors}
    device = next(weights(policy.chunks)).device
    views: dict[int, Tensor] = {}  # of each storage the largest
    for tensor in gc.get_objects():
        # A check of the type reads no attribute, which some objects compute.
        if not issubclass(type(tensor), Tensor) or tensor.device != device:
            continue
        storage = tensor.untyped_storage()._cdata
        if storage not in views or tensor.numel() > views[storage].numel():
            views[storage] = tensor
    sizes = {storage: view.untyped_storage().nbytes() for storage, view in views.items()}
    for storage, view in views.items():
        shape = f"{str(view.dtype).removeprefix('torch.')} {list(view.shape)}"
        names.setdefault(storage, shape)
    largest = sorted(sizes, key=lambda storage: -sizes[storage])[:_LARGEST]
    return [f"{names[storage]} of {show_bytes(sizes[storage])}" for storage in largest]


def _remedy(error: BaseException) -> str:
    """What shrinks the tensors of the innermost part of the package that was running."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        _, package, file = frame.filename.rpartition("megatron_gspo/")
        for part, remedy in _REMEDIES:
            if package and file.startswith(f"{part}/"):
                return remedy
    return _PACKED
