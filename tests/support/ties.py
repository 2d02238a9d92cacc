"""Which samples can be compared with a reference.

Where the router's next best expert is a rounding away, float32 and float64 may both be right with
different experts, and everything after such a position differs. Servers draw without a seed, so
that some sample in a hundred has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_gspo.data.sample import Sample
from tests.support.transformers_reference import gates_of

TIE = 1e-5  # between two logits of a router; float32 is off by 2e-6 at most
FLIPS = 1e-3  # share of experts; one position of a batch of these tests at a tie


def smallest_margin(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """The smallest distance from the last chosen expert's logit to the next: all layers, all
    positions but the last.
    """
    k = model.config.num_experts_per_tok
    margins = []

    def note(gate: torch.nn.Module, arguments: object, output: tuple[torch.Tensor, ...]) -> None:
        best = output[0].topk(k + 1, dim=-1).values
        margins.append(float((best[:-1, k - 1] - best[:-1, k]).min()))

    hooks = [gate.register_forward_hook(note) for gate in gates_of(model)]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(margins)


def without_ties(model: torch.nn.Module, samples: Sequence[Sample]) -> list[Sample]:
    """Those whose routes are beyond doubt; most are."""
    clear = [sample for sample in samples if smallest_margin(model, sample.tokens) > TIE]
    assert len(clear) >= 0.8 * len(samples)
    return clear
