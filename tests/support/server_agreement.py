"""What a real server's samples must agree with: Transformers' log-probs in float64, and its
routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.rollout.sample_checks import check_samples
from tests.support.server_clients import VOCABULARY, prompts_of
from tests.support.server_engine import ServerEngine
from tests.support.ties import without_ties
from tests.support.transformers_reference import (
    load_reference,
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


TRUNCATIONS = {
    "top_p": SamplingParams(2, 12, temperature=0.4, top_p=0.7, top_k=8, max_support=8),
    "min_p": SamplingParams(2, 12, temperature=0.8, min_p=0.3, top_k=8, max_support=8),
}


def check_supports(engine: ServerEngine, path: str, sampling: SamplingParams) -> None:
    """A server of the model at ``path`` returns the ids that could be drawn."""
    prompts = prompts_of([5, 70], VOCABULARY, seed=3)
    reference = load_reference(path)
    generated = without_ties(reference, engine.generate(prompts, sampling, seed=2))
    check_samples(generated, prompts, sampling)
    assert_supports_agree(generated, reference, sampling)


def assert_supports_agree(
    samples: Sequence[Sample], reference: torch.nn.Module, sampling: SamplingParams
) -> None:
    """The ids that could be drawn are the most likely ones, as many as ``sampling`` leaves, and the
    log-probs are over them. Engines differ in whether top-p counts what top-k has left."""
    assert_agrees(samples, reference, temperature=sampling.temperature)
    counts = set()
    for sample in samples:
        distributions = response_distributions(reference, bare(sample), sampling.temperature)
        supports = np.split(sample.support_ids, np.cumsum(sample.support_lengths)[:-1])
        for probs, ids in zip(distributions.detach().exp(), supports, strict=True):
            kept = probs[ids].numpy()
            ordered = np.sort(probs.numpy())[::-1]
            count = len(set(ids.tolist()))
            counts.add(count)
            assert count == len(ids) <= sampling.top_k
            np.testing.assert_allclose(kept.sum(), ordered[:count].sum(), rtol=0, atol=TOLERANCE)
            assert kept.sum() - kept.min() < sampling.top_p + TOLERANCE
            least = sampling.min_p * ordered[0]
            assert kept.min() > least - TOLERANCE
            is_unlikely = count == sampling.top_k or ordered[count] < least + TOLERANCE
            share = kept.sum() / ordered[: sampling.top_k].sum()
            assert is_unlikely or (sampling.top_p < 1 and share > sampling.top_p - TOLERANCE)
    assert len(counts) > 1


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
