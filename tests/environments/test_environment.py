"""Environments behind the pool: steps, replays, and failures that stay with their episode."""

import pytest

from megatron_gspo.environments import environment
from megatron_gspo.environments.environment import EnvironmentLoadError, load_environments
from megatron_gspo.environments.environment_pool import EnvironmentPool
from tests.support.environment_requests import COUNTDOWN, FILE, request


def test_environments_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_MAX_LIVE", 2)
    log = tmp_path / "log"
    live = load_environments(COUNTDOWN, {"log": str(log)})
    for sample in range(3):
        live.answer(request("a", sample=sample))
    assert log.read_text().splitlines().count("closed") == 1  # of sample 0, left alone longest
    assert live.answer(request("a", "b", sample=0)).value["reward"] == 2.0  # played back
    assert live.answer(request("a", "b", "c", sample=0)).value["done"] is True
    # Of sample 1 for room; of sample 0, whose episode is over.
    assert log.read_text().splitlines().count("closed") == 3
    live.answer(request("raise", sample=5))
    assert log.read_text().splitlines().count("closed") == 4


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (
            "none",
            (
                "the environment returned a NoneType; return"
                " megatron_gspo.environments.environment.Turn"
            ),
        ),
        ("text", "the environment returned a str; return"),
        ("word", "the environment's observation is a int; give text"),
        ("done", "the environment's done is 'yes'; give True or False"),
    ],
)
def test_what_is_no_turn_is_said(response, fault):
    reply = load_environments(f"{FILE}:stranger").answer(request(response))
    assert (reply.status, reply.value) == ("invalid", None) and reply.message.startswith(fault)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:make", "environment 'nowhere.py:make': no such file nowhere.py"),
        (f"{FILE}:absent", "has no 'absent'; define it or correct the name"),
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

    code = (
        "import sys, megatron_gspo.environments.environment_worker; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
