"""The host's work for one micro-batch, routes left out: from a sample to what the layers read."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.live_storages import LiveStorages

MIB = 2**20
CONTEXT = (1, 2, 8)  # context-parallel ranks
# What attention's layers read, by kind: Transformer Engine's nothing more, torch's kernel and its
# padded batches.
PLANS: dict[str, tuple[str, ...]] = {
    "Transformer Engine": (),
    "varlen": ("varlen",),
    "padded": ("padded",),
}


def long_sample(tokens: int) -> Any:
    """One sample with all that an objective with a ratio and a reference policy needs, a
    quarter of it the prompt.
    """
    import numpy as np

    from megatron_gspo.data.sample import Sample

    draws = np.random.default_rng(0)
    prompt = tokens // 4
    response = tokens - prompt
    values = {
        name: draws.normal(size=response).astype(np.float32)
        for name in ("old_log_probs", "ref_log_probs", "advantages")
    }
    return Sample(
        0,
        0,
        draws.integers(1000, size=tokens),
        prompt,
        np.ones(response, dtype=np.bool_),
        draws.normal(size=response).astype(np.float32),
        "stop",
        **values,
    )


class HostWork:
    """What the host does for the first of ``ranks`` context-parallel ranks, whose stage is the
    first and the last.
    """

    def __init__(self, tokens: int, ranks: int, plan: str) -> None:
        from megatron_gspo.mcore.micro_batch_inputs import POLICY_LOSS, InputReader

        self.sample = long_sample(tokens)
        self.tokens = tokens
        self.ranks = ranks
        self.plan = plan
        self._cp = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
        groups: Any = SimpleNamespace(
            cp=self._cp, tp=SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        )
        self._reader = lambda: InputReader(groups, num_microbatches=1, loss=POLICY_LOSS)
        self._plans = PLANS[plan] + (("key_copies",) if ranks > 1 and PLANS[plan] else ())

    def packed(self) -> Any:
        """The micro-batch."""
        from megatron_gspo.data.packing import pack

        return pack(
            [self.sample], num_sequences=1, num_tokens=self.tokens, sequence_multiple=2 * self.ranks
        )

    def read(self, batch: Any) -> list[Any]:
        """The rank's inputs and attention's plans."""
        from megatron_gspo.mcore.attention import packed_sequences

        chunk = SimpleNamespace(
            pre_process=True, post_process=True, config=SimpleNamespace(sequence_parallel=False)
        )
        inputs = self._reader().take(iter([batch]), chunk)
        sequences = packed_sequences(
            inputs.batch.cu_seqlens, self.tokens, self._cp, torch.device("cpu")
        )
        sequences.positions.numel()  # of the rotary embedding, not kept
        return [inputs, sequences, *(getattr(sequences, name) for name in self._plans)]

    def peak_bytes(self) -> int:
        """The most that arrays and tensors hold at a time; the sample's own are not counted."""
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            batch = self.packed()
            held, peak = (size - before for size in tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        with LiveStorages() as watch:
            self.read(batch)
        return max(peak, held + watch.peak)
