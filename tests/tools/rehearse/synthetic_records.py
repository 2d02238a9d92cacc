"""A small record of a rehearsal, for tests of what is made from records."""

from megatron_gspo.tools.rehearse.records import (
    Allocation,
    CheckpointPlan,
    Collective,
    Finding,
    HostCopy,
    HostSync,
    Memory,
    MemoryPoint,
    RankRecord,
    Retained,
)

SITE = ("megatron_gspo/mcore/forward_step.py:10 take", "megatron/core/schedules.py:20 step")


def point(phase: str, index: int, activations: int) -> MemoryPoint:
    return MemoryPoint(phase, index, "aten.mm", SITE, {"weights": 100, "activations": activations})


def record(rank: int = 0, world: int = 2) -> RankRecord:
    return RankRecord(
        rank=rank,
        world=world,
        coordinates={"tp": rank, "pp": 0},
        groups={"tp": (0, 1), "world": tuple(range(world))},
        phases=("build", "forward_backward"),
        micro_batches=(64, 64),
        collectives=(
            Collective(
                "allreduce", "tp", (0, 1), "float32", 256, SITE, "forward_backward", reduction="sum"
            ),
            Collective(
                "alltoall_base",
                "ep",
                (0, 1),
                "bfloat16",
                96,
                SITE,
                "forward_backward",
                sent=(64, 32),
                received=(64, 32),
            ),
            Collective("send", "pp", (0, 1), "bfloat16", 8, (), "forward_backward", peer=1),
        ),
        host_syncs=(HostSync("item", SITE, "optimizer", 3),),
        host_copies=(HostCopy(1024, False, True, SITE, "forward_backward", 2),),
        findings=(Finding("dtype_mix", "mm of bfloat16 and float32", SITE, "forward_backward"),),
        memory=Memory(
            states={"weights": 100, "gradients": 200, "optimizer": 600},
            peak=point("forward_backward", 7, 50),
            peak_activations=point("forward_backward", 7, 50),
            peaks={"forward_backward": point("forward_backward", 7, 50)},
            timeline=(point("build", 1, 0), point("forward_backward", 7, 50)),
            largest=(Allocation("activations", "aten.mm", (4, 8), "float32", 1, 50),),
        ),
        retained=(Retained(50, (4, 8), "float32", SITE, "chunk.decoder.layers.0.probs"),),
        checkpoint=CheckpointPlan(3, 600, 600),
        flops={"forward_backward": {"aten.mm": 1000}},
        seconds={"build": 0.5, "forward_backward": 1.5},
        host_peak_bytes=10**9,
        versions={"torch": "2.13.0", "megatron-core": "0.16.1"},
        notes=("2 of 8 micro-batches were run",),
        roles=("stage 0",),
        stands_for=(0, 2),
    )
