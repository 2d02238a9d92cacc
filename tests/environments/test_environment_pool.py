"""Environments in worker processes."""

import pytest

from megatron_gspo.environments.environment_pool import EnvironmentPool
from megatron_gspo.rewards.worker import Reply
from tests.support.environment_requests import COUNTDOWN, request


@pytest.fixture(params=["here", "in processes"])
def pool(request):
    pool = EnvironmentPool(
        COUNTDOWN, {"turns": 2}, timeout=None if request.param == "here" else 20.0
    )
    yield pool
    pool.close()


def test_two_episodes_side_by_side(pool):
    assert pool.step([request("ab"), request("abc", sample=1)]) == [
        Reply("ok", {"observation": "<2>", "reward": 1.0, "done": False}),
        Reply("ok", {"observation": "<3>", "reward": 1.0, "done": False}),
    ]
    [first, second] = pool.step([request("ab", "c"), request("abc", "", sample=1)])
    assert first.value == {"observation": "<1>", "reward": 2.0, "done": True}
    assert second.value == {"observation": "<0>", "reward": 2.0, "done": False}


def test_failures_stay_with_their_episode(pool):
    bad, good = pool.step([request("raise"), request("fine", sample=1)])
    assert bad == Reply("error", message="ValueError: a bad answer") and good.status == "ok"
    [invalid] = pool.step([request("wrong", sample=2)])
    problem = "the environment's reward is nan; give a finite number (float32)"
    assert invalid == Reply("invalid", message=problem)
    assert pool.step([request("fine", "too", sample=1)])[0].value["reward"] == 2.0


def test_a_step_that_hangs_or_dies_costs_its_episode_alone(tmp_path):
    """The other episode's environment was in the same process: it is built again and its
    responses are played back.
    """
    log = tmp_path / "log"
    pool = EnvironmentPool(COUNTDOWN, {"log": str(log)}, timeout=4.0)
    try:
        assert pool.step([request("a", sample=1)])[0].status == "ok"
        assert pool.step([request("hang")]) == [Reply("timeout", message="no result after 4 s")]
        [reply] = pool.step([request("a", "b", sample=1)])
        assert reply.value["reward"] == 2.0
        [died] = pool.step([request("die", sample=2)])
        assert died == Reply("error", message="the environment's process ended (exit code 3)")
    finally:
        pool.close()
    assert [
        line for line in log.read_text().splitlines() if "hang" not in line and "die" not in line
    ] == [
        "made 7/1",
        "step 1 a",
        "made 7/0",
        "made 7/1",
        "step 1 a",
        "step 2 b",
        "made 7/2",
    ]
