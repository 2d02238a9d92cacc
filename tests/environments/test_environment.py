"""Environments behind the pool: steps, replays, and failures that stay with their episode."""

from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments import environment
from megatron_gspo.environments.environment import EnvironmentLoadError, StepRequest, load_environments
from megatron_gspo.environments.environment_pool import EnvironmentPool

FILE = Path(__file__).with_name("example_environments.py")
COUNTDOWN = f"{FILE}:countdown"


def request(*responses, prompt=7, sample=0, seed=1):
    return StepRequest(Prompt(prompt, np.array([3]), "question"), sample, seed, responses)


@pytest.fixture(params=["here", "in processes"])
def pool(request):
    pool = EnvironmentPool(COUNTDOWN, {"turns": 2}, timeout=None if request.param == "here" else 20.0)
    yield pool
    pool.close()


def test_two_episodes_side_by_side(pool):
    assert pool.step([request("ab"), request("abc", sample=1)]) == [
        ("ok", {"observation": "<2>", "reward": 1.0, "done": False}, None),
        ("ok", {"observation": "<3>", "reward": 1.0, "done": False}, None),
    ]
    [first, second] = pool.step([request("ab", "c"), request("abc", "", sample=1)])
    assert first[1] == {"observation": "<1>", "reward": 2.0, "done": True}
    assert second[1] == {"observation": "<0>", "reward": 2.0, "done": False}


def test_failures_stay_with_their_episode(pool):
    bad, good = pool.step([request("raise"), request("fine", sample=1)])
    assert bad == ("error", None, "ValueError: a bad answer") and good[0] == "ok"
    [invalid] = pool.step([request("wrong", sample=2)])
    assert invalid == ("invalid", None, "the environment's reward is nan; give a finite number (float32)")
    assert pool.step([request("fine", "too", sample=1)])[0][1]["reward"] == 2.0


def test_a_step_that_hangs_or_dies_costs_its_episode_alone(tmp_path):
    """The other episode's environment was in the same process: it is built again and its responses are played back."""
    log = tmp_path / "log"
    pool = EnvironmentPool(COUNTDOWN, {"log": str(log)}, timeout=1.0)
    try:
        assert pool.step([request("a", sample=1)])[0][0] == "ok"
        assert pool.step([request("hang")]) == [("timeout", None, "no result after 1 s")]
        [reply] = pool.step([request("a", "b", sample=1)])
        assert reply[1]["reward"] == 2.0
        [died] = pool.step([request("die", sample=2)])
        assert died == ("error", None, "the environment's process ended (exit code 3)")
    finally:
        pool.close()
    assert [line for line in log.read_text().splitlines() if "hang" not in line and "die" not in line] == [
        "made 7/1", "step 1 a", "made 7/0", "made 7/1", "step 1 a", "step 2 b", "made 7/2",
    ]  # fmt: skip


def test_environments_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_MOST_LIVE", 2)
    log = tmp_path / "log"
    live = load_environments(COUNTDOWN, {"log": str(log)})
    for sample in range(3):
        live.answer(request("a", sample=sample))
    assert log.read_text().splitlines().count("closed") == 1  # of sample 0, left alone longest
    assert live.answer(request("a", "b", sample=0))[1]["reward"] == 2.0  # played back
    assert live.answer(request("a", "b", "c", sample=0))[1]["done"] is True
    assert log.read_text().splitlines().count("closed") == 3  # of sample 1 for room; of sample 0, whose episode is over
    live.answer(request("raise", sample=5))
    assert log.read_text().splitlines().count("closed") == 4


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        ("none", "the environment returned a NoneType; return megatron_gspo.environments.environment.Turn"),
        ("text", "the environment returned a str; return"),
        ("word", "the environment's observation is a int; give text"),
        ("done", "the environment's done is 'yes'; give True or False"),
    ],
)
def test_what_is_no_turn_is_said(response, fault):
    status, turn, message = load_environments(f"{FILE}:stranger").answer(request(response))
    assert (status, turn) == ("invalid", None) and message.startswith(fault)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:make", "environment 'nowhere.py:make': no such file nowhere.py"),
        (f"{FILE}:absent", "has no 'absent'; define it or mend the name"),
        (f"{FILE}:NOT_A_FUNCTION", "'NOT_A_FUNCTION' is a int; it must be a function"),
        ("no_such_package.x:make", "importing no_such_package.x failed"),
    ],
)
def test_what_can_not_be_loaded_is_named(name, message):
    for timeout in (None, 20.0):
        with pytest.raises(EnvironmentLoadError) as caught:
            EnvironmentPool(name, timeout=timeout)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert "environment" in str(caught.value) and "verifier" not in str(caught.value)


def test_the_worker_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, megatron_gspo.environments.environment_worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
