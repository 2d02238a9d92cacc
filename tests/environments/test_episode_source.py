"""Groups of episodes on servers: rank 0 runs them, every rank gets the samples or the error."""

from __future__ import annotations

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments.episode_engine import EpisodeEngine
from megatron_gspo.environments.episode_source import EpisodeServerSource
from megatron_gspo.environments.episodes import EpisodeRules
from megatron_gspo.errors import SharedEngineError
from tests.rollout.test_server_source import METRICS
from tests.support.distributed import run_distributed
from tests.support.random_samples import all_samples, assert_same
from tests.support.scripted_engine import ScriptedEngine, ScriptedResponse
from tests.support.scripted_episodes import Depends, encode
from tests.support.scripted_servers import (
    PROMPTS,
    ScriptedServers,
    collective_weights,
    server_source,
)

RULES = EpisodeRules(max_turns=3, max_length=60, max_turn_length=6)
SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=30)


def response(prompt: Prompt, number: int, seed: int) -> ScriptedResponse:
    """Depends on the episode so far and the turn."""
    return ScriptedResponse(
        [5 + prompt.index % 7, 6 + prompt.length % 11, 7 + seed, 1], [-0.5] * 4, text="word"
    )


class Broken:
    def step(self, requests):
        raise ValueError("no environments")


def source_on(servers: ScriptedServers | None, environments=None) -> EpisodeServerSource:
    return EpisodeServerSource(server_source(servers), environments or Depends(), encode, RULES)


def collected(rank: int, world: int, lost: bool) -> tuple[list, list[int]]:
    servers = ScriptedServers(response) if rank == 0 else None
    source = source_on(servers)
    source.update_weights(collective_weights, version=2)
    if servers is not None:
        servers.lost_weights = lost
    source.submit(PROMPTS[:3], SAMPLING, seed=4)
    return all_samples(source.collect(3)), (
        [version for version, _ in servers.updates] if servers else []
    )


@pytest.mark.parametrize("lost", [False, True])
def test_episodes_on_servers_are_those_of_an_engine_on_every_rank(lost):
    engine = ScriptedEngine(response, updates=[(2, {})])
    expected = EpisodeEngine(engine, Depends(), encode, RULES).generate(
        PROMPTS[:3], SAMPLING, seed=4
    )
    (samples, versions), (others, _) = run_distributed(collected, 2, lost)
    assert versions == ([2, 2] if lost else [2]), "a server that lost the weights gets them again"
    for one, other, wanted in zip(samples, others, expected, strict=True):
        assert_same(one, wanted)
        assert_same(other, wanted)
    assert len({sample.response_length for sample in expected}) > 1, "episodes of several lengths"


def failing(rank: int, world: int) -> str:
    source = source_on(ScriptedServers(response) if rank == 0 else None, Broken())
    source.submit(PROMPTS[:1], SAMPLING, seed=0)
    try:
        source.collect(1)
    except SharedEngineError as error:
        return str(error)
    return ""


def test_a_failure_of_the_environments_is_raised_on_every_rank():
    message, other = run_distributed(failing, 2)
    assert message == other and "no environments" in message


def paused(rank: int, world: int) -> list:
    servers = ScriptedServers(response)
    source = source_on(servers)
    source.submit(PROMPTS[:2], SAMPLING, seed=0)
    source.pause(keep=True)
    kept = source.pending()
    source.pause(keep=False)
    source.close()
    return [kept, source.pending(), servers.calls, source.metrics(), list(source.score([]))]


def test_a_pause_keeps_or_discards_what_is_pending():
    [observed] = run_distributed(paused, 1)
    assert observed == [[0, 1], [], ["close"], METRICS, ["http://a"]]
