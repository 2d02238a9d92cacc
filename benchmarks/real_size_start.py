"""What does not grow with the world: what a node reads once at the start, and the collectives of rehearsed worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, say
from benchmarks.real_size_figure import Figure, NotMeasuredError, forget

_WORLDS = (512, 4096)
_MIB = 2**20


def prompt_start(quick: bool) -> list[Figure]:
    """A file of prompts: CPU time of the first process, which tokenises it, and of each other one."""
    from megatron_gspo.config import DataConfig
    from megatron_gspo.data.prompt_cache import PromptCache
    from megatron_gspo.tools.make_tiny_model import character_tokenizer

    count = 2_000 if quick else 20_000
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), character_tokenizer()
        tokenizer.save_pretrained(folder)
        text = "what is the sum of all numbers from one to a hundred? " * 8
        rows = (json.dumps({"prompt": f"{number} {text}", "answer": "1"}) for number in range(count))
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        data = DataConfig(prompts=str(folder / "prompts.jsonl"), verifier="exact_match", max_prompt_length=1024)
        cache, taken = PromptCache(folder / "cache", folder, say), []
        for _ in range(2):
            began = time.process_time()
            assert len(cache.load(folder / "prompts.jsonl", tokenizer, data).prompts) == count
            taken.append(time.process_time() - began)
    return [Figure(f"{count:,} prompts: start of every process but the first of a node", taken[1] / taken[0], 0.05,
                   "of tokenising them", {"first, s": taken[0], "others, s": taken[1]})]  # fmt: skip


def weights_of_a_node(quick: bool) -> list[Figure]:
    """Two replicas of a node load weights that are not in the page cache: bytes that the disk reads."""
    from benchmarks.worlds import fork_server
    from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model

    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:  # on a disk, not in a memory file system
        model = Path(name) / "model"
        write_tiny_model(model, TinyModel(hidden=512, layers=3, experts=8, expert_width=512))
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        with fork_server().Pool(2) as pool:
            read = sum(pool.starmap(_read_by_a_replica, [(rank, name) for rank in range(2)], chunksize=1))
    if read < 0.9 * size:
        raise NotMeasuredError(f"{read:,} of {size:,} bytes came from a disk: the file system keeps the others")
    what = f"two replicas of a node load {size / _MIB:.0f} MiB of weights: read from the disk"
    return [Figure(what, read / size, 1.05, "times the file")]


def _read_by_a_replica(rank: int, folder: str) -> int:
    """Bytes that the disk reads for this process while all load at once."""
    import torch
    import torch.distributed as dist

    from megatron_gspo.config import ModelConfig, ParallelConfig
    from megatron_gspo.mcore.forward_step import unwrap
    from megatron_gspo.mcore.hf_weights import load_weights
    from megatron_gspo.mcore.policy import build_policy
    from megatron_gspo.mcore.process_groups import initialize
    from megatron_gspo.models import family_of, read_config

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model = f"{folder}/model"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        parallel = ParallelConfig()
        groups = initialize(parallel, seed=0)
        policy = build_policy(ModelConfig(path=model, dtype="float32"), parallel, groups, optimizer=None)  # and imports
        family, shape = family_of(read_config(model))
        dist.barrier()
        if rank == 0:
            forget(Path(model))
        dist.barrier()
        before = _bytes_read()
        load_weights([unwrap(chunk) for chunk in policy.chunks], model, family, shape, groups)
        return _bytes_read() - before
    finally:
        dist.destroy_process_group()


def _bytes_read() -> int:
    """That the disk has read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def large_worlds(quick: bool) -> list[Figure]:
    """Rehearsed steps of the last rank of 512 and 4,096: collectives whose group grows with the world, and groups."""
    found = [_rehearsed(world) for world in _WORLDS]
    rows = [Figure(f"rehearsed world of {world:,}: the largest collective over it in a step, without gradients and "
                   "parameters", record["largest"] / 2**20, 1, "MiB")
            for world, record in zip(_WORLDS, found, strict=True)]  # fmt: skip
    groups = {f"{world:,} GPUs": record["groups"] for world, record in zip(_WORLDS, found, strict=True)}
    what = f"process groups of a rank at {_WORLDS[1]:,} GPUs ({found[1]['groups']})"
    return [*rows, Figure(what, found[1]["groups"] / found[0]["groups"], 1, "times those at 512", groups)]


def _rehearsed(world: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.real_size_start", str(world)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    """Rehearse one rank, in a process whose torch has the fake device."""
    from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

    import_torch_with_fake_device()
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.host_log import HostLog
    from tests.tools.rehearse.test_large_worlds import OF_PARAMETERS, across_replicas, in_world

    with fake_cuda(HostLog()):
        record = in_world(int(sys.argv[1]))
    sizes = [float("inf") if c.dtype == "object" else c.bytes
             for c in across_replicas(record) if c.op not in OF_PARAMETERS]  # fmt: skip
    print(json.dumps({"largest": max(sizes), "groups": record.groups_of_rank}))


if __name__ == "__main__":
    main()
