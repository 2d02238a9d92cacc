"""What every kind of server must survive: updates in mid-response."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from tests.support.reference_models import checkpoint
from tests.support.server_agreement import TOLERANCE, bare
from tests.support.server_clients import (
    VOCABULARY,
    counts_of,
    everything,
    prompts_of,
)
from tests.support.server_engine import ServerEngine
from tests.support.ties import TIE, smallest_margin
from tests.support.transformers_reference import observe_routers, response_log_probs
from tests.support.weight_updates import changed_model


def continue_under_new_weights(engine: ServerEngine, path: str, *, length: int) -> None:
    """Responses of `length` tokens at most are interrupted twice. Each token has the version that
    drew it and its log-prob; each row of routes, where the server gives them, is of the version
    that fed it."""
    sampling = SamplingParams(n_samples_per_prompt=3, max_response_length=length, temperature=1.0)
    prompts = prompts_of([70, 70, 90, 40], VOCABULARY, seed=8, shared=30)
    models = {version: changed_model(path, version) for version in (1, 2, 3)}
    engine.update_weights(checkpoint(models[1].float()).items(), version=1)
    stream = engine.client.stream()
    stream.start(prompts, sampling, seed=1)
    bounds = []
    for version in (2, 3):
        bounds.append(_interrupt_midway(stream))
        engine.update_weights(checkpoint(models[version].float()).items(), version=version)
    samples = everything(stream, len(prompts), lambda: pytest.fail("the server has the weights"))
    assert counts_of(engine)["rollout/continued"] > 0
    check_samples(samples, prompts, sampling, vocab_size=engine.client.model.vocab_size)
    models = {version: model.double() for version, model in models.items()}
    checked = 0
    for sample, first, second in zip(samples, *bounds, strict=True):
        size = sample.response_length
        expected = [1] * min(first, size) + [2] * (second - first) + [3] * (size - second)
        assert sample.token_versions.tolist() == expected and sample.weight_version == expected[0]
        checked += _agrees_by_version(sample, models)
    assert checked > len(samples) / 2
    assert {len(set(sample.token_versions.tolist())) for sample in samples} & {2, 3}


def _interrupt_midway(stream: RequestStream) -> list[int]:
    """Stop the servers when a response is begun and not done; how many tokens each response has."""
    deadline = time.monotonic() + 60
    while True:
        stream.stop(keep=True)
        groups = [started.group for started in stream._groups.values()]
        responses = [response for group in groups for response in group._responses]
        if any(response.num_tokens and not response.finished for response in responses):
            return [response.num_tokens for response in responses]
        assert time.monotonic() < deadline and not all(each.finished for each in responses), (
            "too short to be interrupted"
        )
        stream._loop.run(stream._client.pool.resume())
        time.sleep(0.1)


def _agrees_by_version(sample: Sample, models: dict[int, torch.nn.Module]) -> bool:
    """Whether there was something to check: what each version has fed and drawn is what that
    model gives.
    """
    plain = bare(sample)
    versions = sample.token_versions
    if any(
        smallest_margin(models[version], sample.tokens) < TIE for version in set(versions.tolist())
    ):
        return False
    # a position is fed by the request that draws the token after it; those of the prompt by the
    # first one
    fed_by = np.concatenate([np.full(sample.prompt_length - 1, versions[0]), versions])
    for version in set(versions.tolist()):
        log_probs = response_log_probs(models[version], plain)[0].detach().numpy()
        of_version = versions == version
        np.testing.assert_allclose(
            sample.rollout_log_probs[of_version], log_probs[of_version], rtol=0, atol=TOLERANCE
        )
        if sample.routed_experts is not None:
            [routes] = observe_routers(models[version], [plain]).routes
            fed_by_version = fed_by == version
            np.testing.assert_array_equal(
                np.sort(sample.routed_experts[fed_by_version], -1),
                np.sort(routes[fed_by_version], -1),
            )
    return True
