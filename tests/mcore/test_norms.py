"""Norms of the torch layers."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_gspo.mcore.norms import RMSNorm


def test_norms_carry_the_mark_of_sequence_parallelism():
    for marked in (True, False):
        config = SimpleNamespace(params_dtype=torch.float32, use_cpu_initialization=True, sequence_parallel=marked)
        norm = RMSNorm(config, 8)
        assert norm.weight.sequence_parallel is marked
