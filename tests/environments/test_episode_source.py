"""Groups of episodes on servers: each episode continues by itself, across weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.agent_source import HostedGroups
from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.server_engine.request_stream import RequestStream
from tests.support.random_samples import assert_same
from tests.support.scripted_episodes import Depends, host_of, playing
from tests.support.sglang_generator import Generator as ScriptedServer
from tests.support.sglang_generator import Setup, prompts
from tests.support.waiting import wait_for

LIMITS = RunLimits(max_calls=3, max_call_length=6, max_context=60)
SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=30)


class TokenRule:
    """An engine with the token rule of the scripted server."""

    def generate(
        self, questions: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        return [self._sample(question, sampling.max_response_length) for question in questions]

    def _sample(self, question: Prompt, count: int) -> Sample:
        tokens = [10 + (question.length + j) % 50 for j in range(count)]
        return Sample(
            prompt_index=question.index,
            sample_index=0,
            tokens=np.concatenate([question.token_ids, tokens]),
            prompt_length=question.length,
            loss_mask=np.ones(count, dtype=bool),
            rollout_log_probs=-np.array(tokens, dtype=np.float32) / 8,
            finish_reason="length",
            text=str(tokens),
            weight_version=3,
            token_versions=np.full(count, 3, dtype=np.int32),
        )


def stream_of(setup: Setup, environments: Any) -> RequestStream:
    return setup.client.stream(HostedGroups(host_of(environments, LIMITS)))


def test_episodes_on_servers_are_those_of_an_engine() -> None:
    engine: Any = TokenRule()
    expected = playing(engine, Depends(), LIMITS).generate(prompts(3), SAMPLING, seed=4)
    with ScriptedServer() as server, Setup(server.url) as setup:
        stream = stream_of(setup, Depends())
        stream.start(prompts(3), SAMPLING, seed=4)
        samples = [sample for group in stream.take(3) for sample in group]
    for sample, wanted in zip(samples, expected, strict=True):
        assert_same(sample, wanted)
    assert len({sample.response_length for sample in expected}) > 1, "episodes of several lengths"


def test_an_episode_continues_after_a_weight_update() -> None:
    """The bound on staleness is over its oldest token."""
    sampling = SamplingParams(n_samples_per_prompt=1, max_response_length=30)
    with ScriptedServer() as server, Setup(server.url) as setup:
        stream = stream_of(setup, Depends(turns=1))
        server.gate = False
        [ticket] = stream.start(prompts(1), sampling, seed=4)
        wait_for(lambda: len(server.bodies) == 1)
        assert stream.progress()[0].oldest_version is None
        setup.client.interrupt()  # the server returns its first token
        assert stream.progress()[0].oldest_version == 3
        server.version = "00c0ffee:4"
        setup.serve(server.version)
        server.gate = True
        [[sample]] = stream.take(1)
        assert ticket == 0 and sample.token_versions is not None
        trained = sample.token_versions[sample.loss_mask]
        assert trained[0] == 3 and set(trained[1:].tolist()) == {4}


def test_a_failure_of_the_environments_is_raised() -> None:
    class Broken:
        def step(self, requests: Sequence[Any]) -> list[Any]:
            raise ValueError("no environments")

    with ScriptedServer() as server, Setup(server.url) as setup:
        stream = stream_of(setup, Broken())
        stream.start(prompts(1), SAMPLING, seed=0)
        with pytest.raises(ValueError, match="no environments"):
            stream.take(1)


def test_discarded_episodes_are_counted() -> None:
    with ScriptedServer() as server, Setup(server.url) as setup:
        stream = stream_of(setup, Depends())
        server.gate = False
        stream.start(prompts(1), SAMPLING, seed=4)
        wait_for(lambda: len(server.bodies) == 2)
        stream.stop(keep=False)
        assert stream.progress() == []
        assert setup.client.counts["discarded_tokens"] == 2  # one of each, when interrupted
