"""The host's work for a micro-batch of one long sequence, routes left out: linear in its tokens,
and within a few MiB.
"""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gspo.data.packing import PackedBatch, pack
from megatron_gspo.mcore.attention import packed_sequences
from megatron_gspo.mcore.micro_batch_inputs import POLICY_LOSS, InputReader
from tests.support.live_storages import LiveStorages
from tests.support.samples import make_sample

TOKENS = 2**15
# What attention's layers read, Transformer Engine's nothing more, and the most MiB held.
PLANS: dict[str, tuple[tuple[str, ...], int]] = {
    "Transformer Engine": ((), 4),
    "varlen": (("varlen",), 4),
    "padded": (("padded",), 5),
}


class Operations(TorchDispatchMode):
    """Counts operations and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.elements += sum(
            leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)
        )
        return out


def read(batch: PackedBatch, ranks: int, plans: tuple[str, ...]) -> list[Any]:
    """The inputs of the first of some context-parallel ranks, and attention's plans."""
    context = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    groups: Any = SimpleNamespace(cp=context, tp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    chunk = SimpleNamespace(
        pre_process=True, post_process=True, config=SimpleNamespace(sequence_parallel=False)
    )
    inputs = InputReader(groups, num_microbatches=1, loss=POLICY_LOSS).next_inputs(
        iter([batch]), chunk
    )
    bounds = inputs.batch.cu_seqlens
    sequences = packed_sequences(bounds, batch.max_seqlen, context, torch.device("cpu"))
    sequences.positions.numel()  # of the rotary embedding, not kept
    names = plans + (("key_copies",) if ranks > 1 and plans else ())
    return [inputs, sequences, *(getattr(sequences, name) for name in names)]


def work(tokens: int, ranks: int, plans: tuple[str, ...]) -> tuple[int, int, int]:
    """Operations, elements of their results, and bytes held at most."""
    sample = make_sample(tokens // 4, tokens - tokens // 4, values=None, returns=None)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        batch = pack([sample], num_sequences=1, num_tokens=tokens, sequence_multiple=2 * ranks)
        held, peak = (size - before for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    with LiveStorages() as storages:
        read(batch, ranks, plans)
    with Operations() as counted:
        read(batch, ranks, plans)
    return counted.calls, counted.elements, max(peak, held + storages.peak)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_work_is_linear_in_tokens_and_small(ranks, plan):
    plans, most = PLANS[plan]
    calls, elements, peak = work(TOKENS, ranks, plans)
    fewer_calls, fewer_elements, lower_peak = work(TOKENS // 2, ranks, plans)
    assert calls == fewer_calls and elements > TOKENS // ranks
    assert elements < 2.01 * fewer_elements and peak < 2.05 * lower_peak
    assert peak < most * 2**20
