"""A rehearsal counts what the same accounting counts of a real step, in real processes on the
CPU.
"""

import dataclasses
import os
from collections import Counter
from typing import Any
from unittest import mock

from megatron_gspo.kernels import SWITCH
from megatron_gspo.tools.rehearse.records import RankRecord

from .on_fake_gpu import on_fake_gpu

COMPUTED = ("old_log_probs", "forward_backward", "optimizer")


def counted(record: RankRecord) -> Counter[tuple[Any, ...]]:
    """Collectives of tensors.

    Pickled objects are tensors of a real run and have no size in a rehearsal.
    """
    return Counter(
        (c.phase, c.group, c.op, c.dtype, c.bytes, c.peer, c.sent, c.received)
        for c in record.collectives
        if c.phase in COMPUTED and c.dtype not in ("object", "uint8", "int64")
    )


def check(**layout: Any) -> None:
    """Both ranks of a layout of two."""
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from tests.support.distributed import run_distributed

    from .measured_rank import measured_rank, shared_operations
    from .test_rehearse_rank import config

    # only done on a GPU, unless an option is set
    options = {"deallocate_pipeline_outputs": False}
    given = dataclasses.replace(
        config(dtype="float32", num_key_value_heads=4, **layout), megatron=options
    )
    real = run_distributed(measured_rank, 2, given)
    for rank in range(2):
        gpu = FakeGpu(expert_parallel=given.parallel.expert_model_parallel_size)
        with (
            fake_cuda(gpu.host),
            shared_operations(),
            mock.patch("megatron_gspo.tools.rehearse.fake_device.fused_functions._FUNCTIONS", {}),
            mock.patch.dict(os.environ, {SWITCH: "0"}),
        ):
            from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

            fake = rehearse_rank(given, rank, 2, gpu)
        agree(real[rank], fake)


def agree(real: RankRecord, fake: RankRecord) -> None:
    assert real.flops == fake.flops and sum(fake.flops["forward_backward"].values()) > 10**8
    assert counted(real) == counted(fake) and counted(fake)
    assert real.checkpoint == fake.checkpoint
    assert real.memory.states == fake.memory.states
    for phase in COMPUTED[:2]:
        ours = fake.memory.peaks[phase]
        theirs = real.memory.peaks[phase]
        assert ours.op == theirs.op and ours.bytes["inputs"] == theirs.bytes["inputs"], (
            phase,
            ours,
            theirs,
        )
        # lists of rows and counts that the host holds: device tensors of a real run
        extra = theirs.bytes["activations"] - ours.bytes["activations"]
        assert 0 <= extra <= 0.0015 * ours.bytes["activations"], (phase, ours, theirs)


LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    {"expert_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)


@on_fake_gpu
def test_real_and_rehearsed_ranks_agree() -> None:
    for layout in LAYOUTS:
        check(**layout)
