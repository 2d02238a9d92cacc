"""The plan of a checkpoint."""

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import rehearsed


@on_fake_gpu
def test_all_ranks_together_write_every_tensor_once() -> None:
    """Of two tensor-parallel ranks with two experts' ranks: weights in bfloat16 and 12 bytes of the optimizer."""
    plans = [rehearsed(rank, 4, tensor_model_parallel_size=2, expert_model_parallel_size=2).checkpoint
             for rank in (0, 1)]  # fmt: skip
    assert all(plan is not None and 0 < plan.written <= plan.bytes and plan.tensors for plan in plans)
