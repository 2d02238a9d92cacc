"""A perturbation of the routers' choice of one's own: the rollout engine's routers choose experts
by rounded logits, as an engine whose router is not in float32.

routing:
  perturbation: examples/own_code/perturbation.py:rounded
  compare_rollout: true
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gspo.routing_replay.perturbation import RouterTerms


def rounded(terms: RouterTerms, *, dtype: str = "bfloat16") -> Tensor:
    """The logits that experts are chosen by, [t, experts]; the live router's weigh them."""
    if terms.engine == "trainer":
        return terms.logits
    return terms.logits.to(getattr(torch, dtype)).to(terms.logits.dtype)
