"""The host's work for a micro-batch of one long sequence: linear in its tokens, and within a
few MiB.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.host_work import CONTEXT, MIB, PLANS, HostWork

TOKENS = 2**15
MOST = {"Transformer Engine": 4, "varlen": 4, "padded": 5}  # MiB


class Operations(TorchDispatchMode):
    """Counts operations and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.elements += sum(
            leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)
        )
        return out


def work(tokens: int, ranks: int, plan: str) -> tuple[int, int, int]:
    """Operations, elements of their results, and bytes held at most."""
    case = HostWork(tokens, ranks, plan)
    with Operations() as counted:
        case.read(case.packed())
    return counted.calls, counted.elements, case.peak_bytes()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", CONTEXT)
def test_work_is_linear_in_tokens_and_small(ranks, plan):
    calls, elements, peak = work(TOKENS, ranks, plan)
    fewer = work(TOKENS // 2, ranks, plan)
    assert calls == fewer[0] and elements > TOKENS // ranks
    assert elements < 2.01 * fewer[1] and peak < 2.05 * fewer[2]
    assert peak < MOST[plan] * MIB
