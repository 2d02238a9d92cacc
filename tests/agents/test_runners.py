"""Runners that connect by themselves: they claim runs, lose them when they are silent, and end
them."""

from __future__ import annotations

import asyncio
import json
import math
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megatron_gspo.agents.agent_host import AgentHost, RunRequest, single_error
from megatron_gspo.agents.agent_run import AgentRun, RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.players import RunnerPlayer
from megatron_gspo.agents.rendering import TemplateRendering
from megatron_gspo.agents.run_queue import RunQueue
from megatron_gspo.agents.run_verifier import RunVerifier
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer
from tests.agents.test_agent_host import request
from tests.support.agent_endpoint import TOKENIZER, in_event_loop
from tests.support.scripted_generator import ScriptedGenerator


def reply(prompt: str, seed: int) -> str:
    return f"reply {seed}"


@dataclass
class Runners:
    """A host whose runs are claimed, and a session for the runners' requests."""

    host: AgentHost
    queue: RunQueue
    generator: ScriptedGenerator
    address_file: Path
    session: aiohttp.ClientSession
    lines: list[str]
    opened: list[AgentRun] = field(default_factory=list)
    playing: asyncio.Future[list[Sample]] | None = None

    def submit(self, *requests: RunRequest) -> asyncio.Future[list[Sample]]:
        """Their samples, once runners have played them."""
        self.playing = asyncio.ensure_future(
            self.host.samples(requests, self.generator, 40, opened=self.opened)
        )
        return self.playing

    async def address(self) -> dict[str, str]:
        while not self.address_file.exists():
            await asyncio.sleep(0.01)
        return json.loads(self.address_file.read_text())

    async def claim(self) -> dict[str, Any]:
        """The next task; waits for it."""
        while (task := await self.claim_once()) is None:
            await asyncio.sleep(0.01)
        return task

    async def claim_once(self) -> dict[str, Any] | None:
        address = await self.address()
        status, body = await self.post(f"{address['url']}/tasks/claim", {}, address["key"])
        assert status == 200, body
        return body["task"]

    async def post(self, url: str, body: Any, key: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def send(self, task: dict[str, Any], path: str, **body: Any) -> tuple[int, Any]:
        """A request of a run."""
        return await self.post(f"{task['base_url']}/{path}", body, task["key"])

    async def call(self, task: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """One turn; its messages are appended."""
        messages.append({"role": "user", "content": task["prompt"]})
        status, body = await self.send(
            task, "chat/completions", model=task["model"], messages=messages
        )
        assert status == 200, body
        messages.append(body["choices"][0]["message"])

    async def until_lost(self, task: dict[str, Any]) -> None:
        """Wait until a lease expires; the next ones last."""
        while any(run.key == task["key"] for run in self.opened):
            await asyncio.sleep(0.01)
        self.queue.lease = 60.0

    async def play(self, task: dict[str, Any], turns: int = 2, reward: float = 1.0) -> None:
        messages: list[dict[str, Any]] = []
        for _ in range(turns):
            await self.call(task, messages)
        assert (await self.send(task, "reward", reward=reward))[0] == 200
        assert (await self.send(task, "end"))[0] == 200


@asynccontextmanager
async def runners(
    folder: Path,
    *,
    lease: float = 60.0,
    run_timeout: float = 60.0,
    key: str | None = None,
    verifier: RunVerifier | None = None,
    report_seconds: float = 60.0,
) -> AsyncIterator[Runners]:
    lines: list[str] = []
    file = folder / "agents" / "rank_0.json"
    queue = RunQueue(file, lease=lease, key=key, report_seconds=report_seconds, log=lines.append)
    rendering = TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id])
    host = AgentHost(
        AgentEndpoint(rendering, queue=queue, log=lines.append),
        RunnerPlayer(queue, run_timeout=run_timeout),
        RunLimits(),
        concurrent_runs=8,
        verifier=verifier,
    )
    async with aiohttp.ClientSession() as session:
        served = Runners(host, queue, ScriptedGenerator(TOKENIZER, reply), file, session, lines)
        try:
            yield served
        finally:
            if served.playing is not None:
                served.playing.cancel()
            await host.close()


@in_event_loop
async def test_a_runner_claims_plays_and_ends_a_run(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        samples = served.submit(request(3, 1, level=[1]))
        task = await served.claim()
        expected = request(3, 1, level=[1]).task
        assert {name: task[name] for name in expected} == expected
        assert (task["model"], task["lease"]) == ("policy", 60.0)
        assert await served.claim_once() is None, "it is claimed"
        await served.play(task, turns=2, reward=0.5)
        [sample] = await samples
        assert sample.reward == 0.5 and FAILURE not in sample.metadata
        assert sample.metadata["agent"]["calls"] == 2
        assert sample.metadata["agent"]["expired_leases"] == 0


@in_event_loop
async def test_only_the_owner_reads_the_address_which_goes_with_the_endpoint(
    tmp_path: Path,
) -> None:
    async with runners(tmp_path) as served:
        served.submit(request())
        address = await served.address()
        assert stat.S_IMODE(served.address_file.stat().st_mode) == 0o600
        assert list(served.address_file.parent.iterdir()) == [served.address_file]
        assert not any(address["key"] in line for line in served.lines)
    assert not served.address_file.exists()


@in_event_loop
async def test_the_key_of_runners_is_needed_and_is_for_claims_alone(tmp_path: Path) -> None:
    async with runners(tmp_path, key="of runners") as served:
        served.submit(request())
        address = await served.address()
        assert address["key"] == "of runners"
        url = f"{address['url']}/tasks/claim"
        task = await served.claim()
        for key in ("", "another", task["key"]):
            status, body = await served.post(url, {}, key)
            assert (status, body["error"]["code"]) == (401, "invalid_runner_key")
        status, _ = await served.post(f"{task['base_url']}/end", {}, "of runners")
        assert status == 401


@in_event_loop
async def test_two_runners_share_the_runs(tmp_path: Path) -> None:
    """Each run is played once, in the order of submission, and draws what it draws alone."""
    requests = [request(index, sample) for index in range(3) for sample in range(2)]

    async def work(served: Runners, played: list[tuple[int, int]], count: int) -> None:
        for _ in range(count):
            task = await served.claim()
            played.append((task["index"], task["sample"]))
            await served.play(task, reward=float(task["index"]))

    async with runners(tmp_path) as served:
        samples = served.submit(*requests)
        played: list[list[tuple[int, int]]] = [[], []]
        await asyncio.gather(*(work(served, tasks, 3) for tasks in played))
        assert sorted(played[0] + played[1]) == [(r.prompt.index, r.sample_index) for r in requests]
        assert all(tasks == sorted(tasks) for tasks in played)
        together = await samples
        assert [sample.reward for sample in together] == [0, 0, 1, 1, 2, 2]
        alone = served.submit(requests[3])
        await served.play(await served.claim(), reward=1.0)
        [sample] = await alone
        assert sample.tokens.tolist() == together[3].tokens.tolist()


@in_event_loop
async def test_a_dead_runner_loses_its_run(tmp_path: Path) -> None:
    """What was drawn for it is discarded, its key is revoked, and the next runner begins anew."""
    async with runners(tmp_path, lease=1.0) as served:
        samples = served.submit(request())
        lost = await served.claim()
        await served.call(lost, messages := [])
        await served.send(lost, "reward", reward=1.0)
        first_run = served.opened[0]
        await served.until_lost(lost)
        task = await served.claim()
        assert task["index"] == 0 and task["key"] != lost["key"]
        assert task["base_url"] != lost["base_url"]
        assert first_run not in served.opened
        for path, body in (
            ("chat/completions", {"model": "policy", "messages": messages}),
            ("reward", {"reward": 1.0}),
            ("renew", {}),
            ("end", {}),
        ):
            status, _ = await served.send(lost, path, **body)
            assert status == 401, path
        await served.play(task, turns=1, reward=0.25)
        [sample] = await samples
        assert sample.reward == 0.25 and sample.metadata["agent"]["calls"] == 1
        assert sample.metadata["agent"]["expired_leases"] == 1
        first, second = served.generator.calls
        assert first.tokens.tolist() == second.tokens.tolist(), "the same draw again"


@in_event_loop
async def test_a_lost_run_comes_before_the_others(tmp_path: Path) -> None:
    async with runners(tmp_path, lease=0.2) as served:
        served.submit(request(0), request(1))
        await served.until_lost(await served.claim())
        assert (await served.claim())["index"] == 0


@in_event_loop
async def test_every_request_renews_the_lease(tmp_path: Path) -> None:
    """So does a call for as long as it waits for its reply."""
    async with runners(tmp_path) as served:
        samples = served.submit(request())
        task = await served.claim()
        [run] = served.opened
        for path, body in (("renew", {}), ("reward", {"reward": 1.0})):
            run._last_sign -= 1000.0
            assert run.silence >= 1000.0
            assert (await served.send(task, path, **body))[0] == 200
            assert run.silence < 1000.0
        served.generator.gate.clear()
        playing = asyncio.ensure_future(served.play(task))
        while not served.generator.calls:
            await asyncio.sleep(0.01)
        run._last_sign -= 1000.0
        assert run.silence == 0.0
        served.generator.gate.set()
        await playing
        [sample] = await samples
        assert sample.reward == 1.0 and sample.metadata["agent"]["expired_leases"] == 0


@in_event_loop
async def test_a_run_that_no_runner_ends_is_given_up(tmp_path: Path) -> None:
    async with runners(tmp_path, lease=0.1) as served:
        samples = served.submit(request())
        for _ in range(3):
            await served.claim()
        [sample] = await samples
        assert math.isnan(sample.reward)
        assert sample.metadata[FAILURE] == (
            "error: the agent made no call (its runner was silent for 0.1 s, 3 times)"
        )
        assert sample.metadata["agent"]["expired_leases"] == 3


@in_event_loop
async def test_a_run_is_ended_once(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        samples = served.submit(request())
        task = await served.claim()
        await served.play(task)
        status, body = await served.send(task, "end")
        assert (status, body["error"]["code"]) == (401, "session_over")
        [sample] = await samples
        assert sample.reward == 1.0


@in_event_loop
async def test_a_runner_that_makes_no_call_or_posts_no_reward(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        samples = served.submit(request(0), request(1))
        silent = await served.claim()
        await served.send(silent, "end")
        unscored = await served.claim()
        await served.call(unscored, [])
        await served.send(unscored, "end")
        failures = [sample.metadata[FAILURE] for sample in await samples]
        assert failures == [
            "error: the agent made no call (its runner has ended it)",
            "error: the agent ended without a reward (its runner has ended it)",
        ]


@in_event_loop
async def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """Its runner renews the lease for ever. A reward that it has posted counts."""
    async with runners(tmp_path, run_timeout=8.0) as served:
        samples = served.submit(request(0), request(1))
        tasks = [await served.claim(), await served.claim()]
        for task in tasks:
            await served.call(task, [])
        await served.send(tasks[1], "reward", reward=0.5)
        while (await served.send(tasks[0], "renew"))[0] == 200:
            await asyncio.sleep(0.05)
        late, paid = await samples
        assert late.metadata[FAILURE] == "timeout: the agent ran for 8 s without a reward"
        assert paid.reward == 0.5


@in_event_loop
async def test_a_verifier_scores_what_runners_play(tmp_path: Path) -> None:
    file = tmp_path / "verifier.py"
    file.write_text(
        "def score(text, prompt):\n"
        "    assert 'directory' not in prompt.metadata\n"
        "    return len(prompt.metadata['messages'])\n"
    )
    scorer = RunVerifier(RewardScorer(f"{file}:score", timeout=None))
    async with runners(tmp_path, verifier=scorer) as served:
        samples = served.submit(request())
        task = await served.claim()
        await served.call(task, [])
        status, body = await served.send(task, "reward", reward=1.0)
        assert status == 400 and "data.verifier" in body["error"]["message"]
        await served.send(task, "end")
        [sample] = await samples
        assert sample.reward == 2.0


@in_event_loop
async def test_runs_that_nobody_claims_are_reported_and_wait(tmp_path: Path) -> None:
    async with runners(tmp_path, report_seconds=0.05) as served:
        samples = served.submit(request(0), request(1))
        while len(served.lines) < 2:
            await asyncio.sleep(0.01)
        assert served.lines[0] == (
            "agents.external: 2 runs wait for a runner; the address and the key are in"
            f" {served.address_file}"
        )
        for _ in range(2):
            await served.play(await served.claim())
        assert [sample.reward for sample in await samples] == [1.0, 1.0]


@in_event_loop
async def test_runs_that_are_not_wanted_any_more_can_t_be_claimed(tmp_path: Path) -> None:
    """As when a batch is discarded: a claimed run's key is revoked, the others leave the queue."""
    async with runners(tmp_path) as served:
        samples = served.submit(request(0), request(1))
        task = await served.claim()
        samples.cancel()
        with pytest.raises(asyncio.CancelledError):
            await samples
        assert await served.claim_once() is None
        assert (await served.send(task, "renew"))[0] == 401


@in_event_loop
async def test_an_engine_that_fails_ends_the_runs(tmp_path: Path) -> None:
    async with runners(tmp_path) as served:
        served.generator.failures = [EngineError("out of memory")]
        samples = served.submit(request(0), request(1))
        task = await served.claim()
        messages = [{"role": "user", "content": "list"}]
        status, _ = await served.send(task, "chat/completions", model="policy", messages=messages)
        assert status == 503
        await served.send(task, "end")
        with pytest.raises(EngineError, match="out of memory"), single_error():
            await samples


@in_event_loop
async def test_without_runners_nothing_can_be_claimed(tmp_path: Path) -> None:
    endpoint = AgentEndpoint(TemplateRendering(TOKENIZER, [TOKENIZER.eos_token_id]))
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{endpoint.url}/tasks/claim") as response:
                assert response.status == 404
    finally:
        await endpoint.close()
