"""Every attack under every isolation of this machine: contained, scored as it should be, and
nothing left.
"""

import os
import socket
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.case_formats import read_tests
from megatron_gspo.rewards.sandbox.code_verifier import run_tests
from tests.rewards.sandbox.attacks import ATTACKS, CALLS
from tests.rewards.sandbox.mechanisms import PARAMETERS, descendants, local_sandbox

# Where no limit of time is what ends the attack, a busy machine has long enough not to reach it.
LIMITS = {"time_limit": 0.3}
OTHERS = 2.0
CONFIG = CodeConfig()
STDIN = read_tests({"tests": [{"input": "2 3\n", "output": "5"}]})
CALL = read_tests({"fn_name": "add", "tests": [{"args": [2, 3], "output": 5}]})


@pytest.fixture(scope="module", params=PARAMETERS)
def sandboxes(request):
    """By time limit in seconds."""
    os.environ["API_KEY"] = "secret"
    limits = {*LIMITS.values(), OTHERS}
    sandboxes = {
        seconds: local_sandbox(request.param, time_limit=seconds, memory_mib=128)
        for seconds in limits
    }
    try:
        yield sandboxes
    finally:
        del os.environ["API_KEY"]
        for sandbox in sandboxes.values():
            sandbox.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What the attacks look for: a file that all can read, a listening port and an abstract
    socket.
    """
    name = f"sandbox-test-{uuid.uuid4()}"
    marker = Path("/tmp") / name
    marker.write_text("the answer is 5")
    marker.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + name)
        local.listen()
        yield SimpleNamespace(
            MARKER=marker, PORT=server.getsockname()[1], ABSTRACT=name, PID=os.getpid()
        )
    marker.unlink()


def filled(program, host):
    for name, value in vars(host).items():
        program = program.replace("{" + name + "}", str(value))
    return program


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_it_is_contained(sandboxes, host, attack):
    sandbox = sandboxes[LIMITS.get(attack.verdict, OTHERS)]
    assert run_tests(sandbox, filled(attack.program, host), STDIN, CONFIG) == [attack.verdict]
    (launcher,) = sandbox._launcher.process_ids
    assert descendants(launcher) == set()
    assert host.MARKER.read_text() == "the answer is 5"


@pytest.mark.parametrize("attack", CALLS, ids=lambda attack: attack.name)
def test_a_call_is_contained(sandboxes, attack):
    sandbox = sandboxes[LIMITS.get(attack.verdict, OTHERS)]
    assert run_tests(sandbox, attack.program, CALL, CONFIG) == [attack.verdict]
