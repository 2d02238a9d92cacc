"""Checkpoints of a model of which each rank owns a GiB of weights and optimizer: memory, waiting, and the disk's rate.

Dense models with float32 weights and Adam, without training: 1 rank, 2 data-parallel ranks, and 2 x 2 with tensor
parallelism. Before and after each save (load) the same ranks each write (read) a plain file of the size of their own
part, past the page cache: the rate of a shared disk changes by the second. A ratio is the median over the repeats.

Where the disk is faster than the cores, a load takes as long as its ranks need to hand each other the weights. So saves
and loads are measured a second time on a disk with a limit, as the trainer's links are for updates of weights.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, say
from benchmarks.limited_disk import join, limited_disk
from benchmarks.real_size_figure import Figure, forget, memory, reset_peak

_GIB, _BLOCK = 2**30, 16 << 20
_WORLDS = {1: (1, 4), 2: (1, 10), 4: (2, 23)}  # ranks -> tensor-parallel ranks, layers
_REPEATS = 3
_RATE = 400_000_000  # bytes per second of the limited disk, each way


def checkpoint_costs(quick: bool) -> list[Figure]:
    """Memory, waiting and rates of saves and loads at 1, 2 and 4 ranks."""
    return _figures({ranks: _in_world(ranks, quick, _REPEATS) for ranks in _WORLDS}, (
        ("checkpoint save: host memory beyond the model", "save_memory", 1.2, "times what a rank owns"),
        ("checkpoint load: host memory beyond the model", "load_memory", 1.2, "times what a rank owns"),
        ("checkpoint save: the loop waits", "wait", 1.5, "times a copy in memory"),
        ("checkpoint save", "save", 1.2, "times the disk's time"),
        ("checkpoint load", "load", 1.2, "times the disk's time"),
    ))  # fmt: skip


def limited_disk_rates(quick: bool) -> list[Figure]:
    """Rates of saves and loads at 1, 2 and 4 ranks on a disk with a limit."""
    (ROOT / "build").mkdir(exist_ok=True)
    rate = _RATE // 2 if quick else _RATE
    disk = f"a disk of {rate // 10**6} MB/s"
    with limited_disk(ROOT / "build", rate) as group:
        found = {ranks: _in_world(ranks, quick, _REPEATS, group) for ranks in _WORLDS}
    return _figures(found, (
        (f"checkpoint save to {disk}", "save", 1.2, "times the disk's time"),
        (f"checkpoint load from {disk}", "load", 1.2, "times the disk's time"),
    ))  # fmt: skip


def _figures(found: dict[int, dict[str, float]], rows: Sequence[tuple[str, str, float, str]]) -> list[Figure]:
    """found: of `_in_world` by ranks. rows: name, key of its result, target, unit."""
    return [
        Figure(f"{what}, ranks with {result['owned'] / _GIB:.2f} GiB each: {ranks}", result[key], target, unit)
        for what, key, target, unit in rows
        for ranks, result in found.items()
    ]


def _in_world(ranks: int, quick: bool, repeats: int, group: Path | None = None) -> dict[str, float]:
    """The largest memory of any rank, and medians of the times and ratios that the ranks have together.

    group: of a limited disk, which the ranks join.
    """
    from benchmarks.worlds import fork_server

    (ROOT / "build").mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(dir=ROOT / "build")  # on a disk, not in a memory file system
    try:
        context = fork_server()
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, quick, repeats, group)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a rank of {ranks} failed")
        results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        shutil.rmtree(folder)
    found = {key: max(result[key] for result in results) for key in results[0]}
    total = sum(result["owned"] for result in results)
    rates = {name: f"{total / found[name] / 1e6:.0f} MB/s" for name in ("save_s", "write_s", "load_s", "read_s")}
    times = {name: f"{found[name]:.2f} s" for name in ("wait_s", "first_s", "copy_s")}
    say(ranks, "ranks:", *(f"{name[:-2]} {text}" for name, text in (rates | times).items()))
    return found


def _rank(rank: int, ranks: int, folder: str, quick: bool, repeats: int, group: Path | None) -> None:
    import torch
    import torch.distributed as dist

    from megatron_gspo.mcore.checkpoint.owned_state import bytes_of, pieces_to_write
    from megatron_gspo.mcore.checkpoint.save_load import begin_save, load_checkpoint, make_image

    torch.set_num_threads(1)
    if group is not None:
        join(group)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    policy = _policy(Path(folder), ranks, quick)
    owned = bytes_of(pieces_to_write(policy))
    plain = _Plain(Path(folder) / f"plain_{rank}", owned, policy.chunks[0].buffers[0].param_data)
    saves = Path(folder) / "saves"

    began = time.perf_counter()
    gc.collect()
    before = reset_peak()
    image = make_image(policy)
    begin_save(policy, saves, 0, {}, keep=1, image=image).finish()
    first, save_memory = time.perf_counter() - began, memory("VmHWM") - before
    taken: dict[str, list[float]] = defaultdict(list)
    load_memory = 0
    for repeat in range(1, 2 if quick else repeats + 1):
        waits: list[float] = []
        copies, writes, reads = [_together(plain.copy)], [_together(plain.write)], []
        saved = _together(lambda step=repeat, waits=waits: _save(policy, saves, step, image, waits))
        copies.append(_together(plain.copy))
        writes.append(_together(plain.write))
        forget(saves)
        reads.append(_together(plain.read))
        before = reset_peak()
        loaded = _together(lambda step=repeat: load_checkpoint(policy, saves / f"step_{step:06d}"))
        load_memory = max(load_memory, memory("VmHWM") - before)
        reads.append(_together(plain.read))
        for name, ours, disk, theirs in (
            ("wait", sum(waits), "copy", copies), ("save", saved, "write", writes), ("load", loaded, "read", reads)
        ):  # fmt: skip
            reference = sum(theirs) / len(theirs)
            taken[f"{name}_s"].append(ours)
            taken[f"{disk}_s"].append(reference)
            taken[name].append(ours / reference)
    result = {name: statistics.median(values) for name, values in taken.items()}
    result |= {"owned": owned, "save_memory": save_memory / owned, "load_memory": load_memory / owned, "first_s": first}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _save(policy: Any, folder: Path, step: int, image: Any, waits: list[float]) -> None:
    """A save that is polled until it is complete; `waits`: how long the loop did nothing else."""
    from megatron_gspo.mcore.checkpoint.save_load import begin_save

    began = time.perf_counter()
    save = begin_save(policy, folder, step, {}, keep=1, image=image)
    waits.append(time.perf_counter() - began)
    save.finish()


def _together(function: Callable[[], Any]) -> float:
    """Seconds from a barrier to a barrier."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


class _Plain:
    """Memory and a file of what this rank owns: the rates of both without anything else."""

    def __init__(self, path: Path, size: int, source: Any) -> None:
        """source: a large tensor."""
        import torch

        self._path, self._count = path, -(-size // _BLOCK)
        blocks = torch.ones(16 * _BLOCK + 4096, dtype=torch.uint8)  # more than caches hold
        start = -blocks.data_ptr() % 4096
        self._blocks = blocks[start : start + 16 * _BLOCK].split(_BLOCK)
        self._sources = [block for block in source.view(torch.uint8).split(_BLOCK) if len(block) == _BLOCK]

    def copy(self) -> None:
        for number in range(self._count if self._sources else 0):
            self._blocks[number % 16].copy_(self._sources[number % len(self._sources)])

    def write(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
        for _ in range(self._count):
            os.write(file, self._blocks[0].numpy())
        os.fsync(file)
        os.close(file)

    def read(self) -> None:
        file = os.open(self._path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for _ in range(self._count):
            os.readv(file, [self._blocks[0].numpy()])
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _policy(folder: Path, ranks: int, quick: bool) -> Any:
    """Random weights and moments; each rank owns about a GiB, quick a third of that."""
    import torch

    from megatron_gspo.config import ModelConfig, OptimizerConfig, ParallelConfig
    from megatron_gspo.mcore.checkpoint.owned_state import start_optimizer
    from megatron_gspo.mcore.policy import build_policy
    from megatron_gspo.mcore.policy_tensors import torch_optimizers
    from megatron_gspo.mcore.process_groups import initialize

    tensor, layers = _WORLDS[ranks]
    hidden = 512 if quick else 1024
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "head_dim": 128,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 4 * hidden, "vocab_size": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    parallel = ParallelConfig(tensor_model_parallel_size=tensor)
    groups = initialize(parallel, seed=0)
    model = ModelConfig(path=str(folder), dtype="float32", init="random")
    policy = build_policy(model, parallel, groups, optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0))
    start_optimizer(policy)
    for inner in torch_optimizers(policy.optimizer):
        for state in inner.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(torch.rand(()).expand_as(state[name]))
    return policy
