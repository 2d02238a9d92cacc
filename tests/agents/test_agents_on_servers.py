"""Agents whose process requests their replies from servers itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from megatron_gspo.agents import agent_process
from megatron_gspo.agents.agent_process import AgentProcess
from megatron_gspo.agents.agent_source import AgentGroups
from megatron_gspo.agents.engine_generators import ServerGenerator
from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.request_stream import RequestStream, WeightsNeeded
from megatron_gspo.rollout.server_engine.rollout_client import COUNTS
from tests.agents.test_agent_host import played, request
from tests.agents.test_agent_process import PROGRAM, same, settings
from tests.support.sglang_generator import VERSION, Setup
from tests.support.sglang_generator import Generator as ScriptedServer
from tests.support.waiting import wait_for

LENGTH = 6  # of a reply
ONE = SamplingParams(1, LENGTH)
TWO = SamplingParams(2, LENGTH)
NEWER = "00c0ffee:4"


@dataclass
class Served:
    """A server, the trainer's client of it, and groups of the agents' process."""

    server: ScriptedServer
    setup: Setup
    process: AgentProcess
    stream: RequestStream

    @property
    def child(self) -> psutil.Process:
        """The process that makes the requests."""
        return psutil.Process(self.process.process_id).children()[0]

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTS, self.setup.client.take_counts(), strict=True))

    def wait_for_requests(self, count: int) -> None:
        wait_for(lambda: len(self.server.bodies) >= count)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with ScriptedServer() as server, Setup(server.url) as setup:
        process = AgentProcess(settings())
        yield Served(server, setup, process, setup.client.stream(AgentGroups(process)))
        server.gate = True
    assert not psutil.pid_exists(process.process_id)


@pytest.fixture
def served(shared: Served) -> Served:
    shared.server.bodies.clear()
    shared.server.gate = True
    shared.server.version = VERSION
    shared.setup.serve()
    shared.counts()
    return shared


def test_the_samples_are_those_of_a_client_in_this_process(served: Served) -> None:
    """Bit by bit, by requests of the agents' process alone, without torch."""
    task = request(0, steps="call call reward=1").prompt
    served.stream.start([task], TWO, seed=1)
    [samples] = served.stream.take(1)
    assert served.counts()["requests"] == 4
    [progress] = [served.stream.progress()]
    assert progress == []
    requested = served.server.bodies
    served.server.bodies = []

    async def here() -> None:
        generator = ServerGenerator(served.setup.client, TWO)
        both = [request(0, sample, steps="call call reward=1") for sample in range(2)]
        for sample, other in zip(
            samples,
            await played(PROGRAM, *both, generator=generator, max_call_length=LENGTH),
            strict=True,
        ):
            same(sample, other)

    served.setup.loop.run(here())
    assert sorted(map(str, requested)) == sorted(map(str, served.server.bodies))
    connections = {
        connection.raddr.port for connection in served.child.net_connections() if connection.raddr
    }
    assert int(served.server.url.rpartition(":")[2]) in connections
    libraries = {mapped.path for mapped in served.child.memory_maps()}
    assert not any("libtorch" in path for path in libraries)


def test_an_update_interrupts_calls_there(served: Served) -> None:
    served.server.gate = False
    served.stream.start([request(0, steps="call reward=1").prompt], ONE, seed=1)
    served.wait_for_requests(1)
    served.setup.client.interrupt()
    [progress] = served.stream.progress()
    assert progress.oldest_version == 3, "of the part that has come back"
    served.server.gate = True
    served.server.version = NEWER
    assert len(served.server.bodies) == 1, "nothing is requested during an update"
    served.setup.serve(NEWER)
    [[sample]] = served.stream.take(1)
    versions = sample.token_versions
    assert versions is not None and versions.tolist() == [3] + [4] * (LENGTH - 1)
    assert served.counts()["continued"] == 1


def test_other_weights_are_found_there_and_needed_here(served: Served) -> None:
    served.server.version = NEWER
    served.stream.start([request(0, steps="call reward=1").prompt], ONE, seed=1)
    with pytest.raises(WeightsNeeded):
        served.stream.take(1)
    served.setup.serve(NEWER)
    [[sample]] = served.stream.take(1)
    assert sample.weight_version == 4
    assert served.counts()["stale_responses"] >= 1


def test_what_is_discarded_is_counted(served: Served) -> None:
    served.server.gate = False
    served.stream.start([request(0, steps="call").prompt], ONE, seed=1)
    served.wait_for_requests(1)
    agents = served.child.children()
    served.stream.stop(keep=False)
    assert served.counts()["discarded_tokens"] == 1
    assert not any(agent.is_running() for agent in agents)


def test_a_process_that_hangs_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "_ANSWER_SECONDS", 0.5)
    served.child.suspend()
    with pytest.raises(EngineError, match="^agents: .* has not answered for 0.5 s; kill it and "):
        served.stream.progress()
    served.child.resume()
    monkeypatch.undo()
    assert served.stream.progress() == []


def test_the_death_of_the_process_ends_the_groups_in_one_line(served: Served) -> None:
    served.server.gate = False
    served.stream.start([request(0, steps="call").prompt], ONE, seed=1)
    served.wait_for_requests(1)
    started = psutil.Process(served.process.process_id).children(recursive=True)
    served.child.kill()
    with pytest.raises(EngineError, match="^agents: .* has ended .killed by SIGKILL.; "):
        served.stream.take(1)
    served.setup.client.interrupt()
    assert served.counts()["requests"] == 0
    wait_for(lambda: not any(process.is_running() for process in started))
