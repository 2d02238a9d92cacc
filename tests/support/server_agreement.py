"""What a real server's samples must agree with: Transformers' log-probs in float64, and its
routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_gspo.data.sample import Sample
from tests.support.transformers_reference import (
    observe_routers,
    response_distributions,
    response_log_probs,
)

TOLERANCE = 2e-5  # nats, float32 against float64


def bare(sample: Sample) -> Sample:
    """The sample without routes."""
    return replace(sample, routed_experts=None, missing_routes=None)


def assert_agrees(
    samples: Sequence[Sample], reference: torch.nn.Module, *, temperature: float
) -> None:
    """The reference gives each sample's log-probs at ``temperature``, has its most likely ids, and
    takes its routes, where it has some.

    No two experts' logits may be as close as rounding (see `ties.without_ties`).
    """
    plain = [bare(sample) for sample in samples]
    for sample, without in zip(samples, plain, strict=True):
        log_probs = (
            response_log_probs(reference, without, temperature=temperature)[0].detach().numpy()
        )
        np.testing.assert_allclose(sample.rollout_log_probs, log_probs, rtol=0, atol=TOLERANCE)
        if sample.rollout_top_ids is not None:
            _assert_top_ids_agree(sample, response_distributions(reference, without, temperature))
    if any(sample.routed_experts is not None for sample in samples):
        for sample, routes in zip(samples, observe_routers(reference, plain).routes, strict=True):
            np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), np.sort(routes, -1))


def _assert_top_ids_agree(sample: Sample, distributions: torch.Tensor) -> None:
    """``distributions`` [R, V]: of the reference. Ids that are as likely as rounding may stand for
    each other."""
    ids = torch.from_numpy(sample.rollout_top_ids).long()
    count = ids.shape[1]
    assert all(len(set(row)) == count for row in ids.tolist())
    log_probs = distributions.detach().gather(1, ids)
    np.testing.assert_allclose(
        sample.rollout_top_log_probs, log_probs.numpy(), rtol=0, atol=TOLERANCE
    )
    least = distributions.detach().topk(count, dim=1).values[:, -1]
    assert (log_probs.min(1).values >= least - 2 * TOLERANCE).all()
