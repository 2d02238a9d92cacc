"""Started groups are taken once, in order, or returned; old ones are waited for; failures don't
hang.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from aiohttp import web

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.request_stream import WeightsNeeded, select_groups
from megatron_gspo.rollout.server_engine.server_pool import NoServerError
from tests.support.sglang_generator import SAMPLING, Generator, Setup, expected, prompts
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("short_pauses")


def take_due(setup: Setup, count: int, oldest: int | None, seconds: float = 20.0) -> list[int]:
    """The prompts of `count` groups that a step may take (`select_groups`), as the ranks take
    them; those that can be taken after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        setup.stream.wait(0.02)
        groups = list(setup.stream.progress())
        chosen = select_groups(groups, count, oldest, count)
        if len(chosen) == count or time.monotonic() > deadline:
            return indices(setup.stream.remove([group.ticket for group in chosen]))


def indices(groups: list[list]) -> list[int]:
    assert all([s.sample_index for s in group] == list(range(len(group))) for group in groups)
    return [group[0].prompt_index for group in groups]


def test_groups_come_in_the_order_of_their_start_each_once(server):
    with Setup(server.url) as setup:
        assert setup.stream.start(prompts(5), SAMPLING, seed=1) == [0, 1, 2, 3, 4]
        wait_for(lambda: setup.client.counts["requests"] == 10, pause=0.005)
        assert indices(setup.stream.take(2)) == [0, 1]
        assert setup.stream.start([Prompt(9, np.arange(4), "")], SAMPLING, seed=1) == [5]
        assert [ticket for ticket, *_ in setup.stream.progress()] == [2, 3, 4, 5]
        assert [ticket for ticket, _ in setup.stream.take_tickets(4)] == [2, 3, 4, 5]
        with pytest.raises(ValueError, match=r"take\(1\): only 0 groups were started"):
            setup.stream.take(1)


def interrupted(setup: Setup, server: Generator, version: str) -> None:
    """All requests in flight return after one token; `version` is then the current one."""
    wait_for(lambda: len(server.bodies) >= setup.waiting, pause=0.005)
    setup.stream.stop(keep=True)
    server.version = version
    setup.serve(version)


def test_what_is_kept_goes_on_where_it_was(server):
    server.gate = False
    with Setup(server.url) as setup:
        setup.waiting = 4
        wanted = prompts(2)
        setup.stream.start(wanted, SAMPLING, seed=1)
        interrupted(setup, server, "00c0ffee:4")
        assert server.aborts >= 1
        assert [group.oldest_version for group in setup.stream.progress()] == [3, 3]
        setup.waiting = 8
        interrupted(setup, server, "00c0ffee:6")
        server.gate = True
        groups = setup.stream.take(2)
        counts = setup.client.counts
    for prompt, group in zip(wanted, groups, strict=True):
        for sample in group:
            assert sample.response_ids.tolist() == expected(prompt)
            np.testing.assert_array_equal(
                sample.rollout_log_probs, -np.array(expected(prompt), np.float32) / 8
            )
            assert sample.token_versions.tolist() == [3, 4, 6, 6] and sample.weight_version == 3
    assert counts["continued"] == 8 and counts["discarded_tokens"] == counts["retries"] == 0
    sent = [
        (len(body["input_ids"]), body["sampling_params"]["max_new_tokens"])
        for body in server.bodies
    ]
    assert sent == [(5, 4)] * 4 + [(6, 3)] * 4 + [(7, 2)] * 4


def test_what_is_not_kept_is_given_back_and_counted(server):
    server.gate = False
    with Setup(server.url) as setup:
        wanted = prompts(2)
        setup.stream.start(wanted, SAMPLING, seed=1)
        wait_for(lambda: len(server.bodies) == 4, pause=0.005)
        setup.stream.stop(keep=False)
        assert setup.stream.progress() == [] and setup.client.counts["discarded_tokens"] == 4
        server.gate = True
        setup.stream.start(wanted, SAMPLING, seed=1)  # starts over
        groups = setup.stream.take(2)
        assert [sample.response_ids.tolist() for sample in groups[1]] == [expected(wanted[1])] * 2
        assert [len(body["input_ids"]) for body in server.bodies] == [5] * 8


def hold_back(server: Generator, length: int) -> Callable[[], None]:
    """Answers to prompts of this length wait until what is returned is called."""
    may_go = threading.Event()

    async def wait(answer):
        while answer["meta_info"]["prompt_tokens"] == length and not may_go.is_set():
            await asyncio.sleep(0.005)
        return answer

    server.always = wait
    return may_go.set


def test_a_group_that_is_due_is_waited_for_and_comes_first(server):
    """Group 0 has a token of version 3; while it is slow, others that are done don't pass it
    where 3 is the bound.
    """
    with Setup(server.url) as setup:
        server.gate = False
        slow = [Prompt(0, np.arange(9), "")]
        setup.stream.start(slow, SAMPLING, seed=1)
        setup.waiting = 2
        interrupted(setup, server, "00c0ffee:4")
        go_on = hold_back(server, 10)  # its nine tokens and the one that was drawn
        server.gate = True
        setup.stream.start([Prompt(i, np.arange(5), "") for i in (1, 2, 3)], SAMPLING, seed=1)
        wait_for(lambda: setup.client.counts["requests"] >= 8, pause=0.005)
        assert indices(setup.stream.take(1)) == [1], "no bound: who is done first"
        assert take_due(setup, 1, 2) == [2], "version 3 is younger than the bound"
        assert take_due(setup, 1, 3, 0.2) == []
        go_on()
        assert take_due(setup, 2, 3) == [0, 3]


def test_no_server_at_all_ends_after_the_recovery_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with Setup(url, recovery_timeout=0.3) as setup:
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        began = time.monotonic()
        with pytest.raises(NoServerError) as caught:
            setup.stream.take(1)
        assert 0.3 <= time.monotonic() - began < 10
        assert (
            str(caught.value)
            == f"no server has answered for 0.3 s: {url}: server {url}/generate: no connection "
            "(connection refused)"
        )


def test_a_server_that_comes_back_without_the_weights_wants_them(server):
    with Setup(server.url, health_interval=0.02) as setup:
        setup.loop.run(setup.pool.mark_down(setup.pool.servers[0], "gone"))
        server.version = "default"
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        watch = setup.loop.spawn(setup.pool.monitor())
        with pytest.raises(WeightsNeeded):
            setup.stream.take(1)
        watch.cancel()
        assert not server.bodies


def test_one_failure_is_raised_whatever_else_is_done(server):
    """Each further call raises it again: no failure of a started request is lost."""
    server.breaks = [lambda answer: web.Response(status=400, text="no")]
    with Setup(server.url) as setup:
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        setup.stream.start([Prompt(5, np.arange(3), "")], SAMPLING, seed=1)
        for _ in range(2):
            with pytest.raises(EngineError, match="sample 0/0: .*answered 400: no"):
                setup.stream.take(1)


@pytest.mark.parametrize("token", [96, 10**6, -1])
def test_a_token_outside_the_vocabulary_never_leaves(server, token):
    """It ends a real server."""
    bad = Prompt(1, np.array([3, token, 4]), "")
    with Setup(server.url) as setup:
        with pytest.raises(ValueError, match="prompt 1"):
            setup.stream.start([prompts(1)[0], bad], SAMPLING, seed=1)
        assert setup.stream.progress() == [] and not server.bodies
        setup.stream.start(prompts(1), SAMPLING, seed=1)
        assert indices(setup.stream.take(1)) == [0]


def test_a_prompt_that_leaves_no_room(server):
    with Setup(server.url) as setup:
        with pytest.raises(
            ValueError,
            match=r"prompt 0: 61 tokens \+ max_response_length=4 exceed the 64 positions",
        ):
            setup.stream.start([Prompt(0, np.zeros(61, dtype=np.int64), "")], SAMPLING, seed=1)
        setup.stream.start(
            [Prompt(0, np.zeros(60, dtype=np.int64), "")], SamplingParams(1, 4), seed=1
        )
        assert indices(setup.stream.take(1)) == [0]


@dataclass(eq=False)
class Group:
    """How far a group is; see `GroupProgress`."""

    ticket: int
    oldest_version: int | None
    finished: bool


def test_who_goes_now_so_that_nobody_is_too_old_later():
    """Version 3 is the oldest that may be taken, later steps take two groups each."""
    given = [(4, True), (5, True), (4, True), (4, False), (4, True), (None, False)]
    groups = [Group(i, version, done) for i, (version, done) in enumerate(given)]

    def taken(count: int, oldest: int | None) -> list[int]:
        return [group.ticket for group in select_groups(groups, count, oldest, 2)]

    assert taken(2, None) == [0, 1]
    assert taken(2, 0) == [0, 1], "four of version 4 have four steps"
    assert taken(2, 3) == [
        0,
        2,
    ], "of four that have one more step two go now, before the younger one"
    assert taken(3, 3) == [0, 2, 1]
    assert taken(3, 4) == [0, 2, 4]
    assert taken(4, 4) == [0, 2, 4], "the fourth place is kept"


@pytest.mark.parametrize(
    ("staleness", "oversampling", "overlap"),
    [
        (1, 2.0, False),
        (1, 1.0, True),
        (1, 2.0, True),
        (2, 3.0, False),
        (2, 2.5, True),
        (3, 1.0, True),
        (3, 4.0, False),
        (5, 1.7, True),
    ],
)
def test_no_order_of_finishing_breaks_the_bound(staleness, oversampling, overlap):
    """The steps of `loop/generation.py`; the last group that was started finishes first, or any
    group.
    """
    size = 3
    for seed in range(6):
        rng = np.random.default_rng(seed)
        pending: list[Group] = []
        tickets = itertools.count()

        def begin(count: int, version: int, pending=pending, tickets=tickets, rng=rng) -> None:
            while len(pending) < count:
                pending.append(
                    Group(next(tickets), version if rng.random() < 0.9 else None, finished=False)
                )

        for version in range(30):
            begin(math.ceil(size * oversampling), version)
            take_step(pending, size, version, version - staleness, rng if seed else None)
            if overlap:
                begin(size * staleness, version)


def take_step(
    pending: list[Group],
    size: int,
    version: int,
    oldest: int,
    rng: np.random.Generator | None,
) -> None:
    """A step takes its groups; they finish one at a time until it has them."""
    missing = size
    while missing:
        for group in (chosen := select_groups(pending, missing, oldest, size)):
            assert group.finished and group.oldest_version >= oldest, "older than the bound"
            pending.remove(group)
        missing -= len(chosen)
        unfinished = [group for group in pending if not group.finished]
        if missing and unfinished:
            group = unfinished[-1] if rng is None else unfinished[rng.integers(len(unfinished))]
            group.finished = True
            if group.oldest_version is None:
                group.oldest_version = version
