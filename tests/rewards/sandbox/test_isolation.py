"""What is found on this machine, and that the probe sees what is not isolated."""

import os
import shutil
import subprocess
import sys

import pytest

from megatron_gspo.rewards.sandbox.command import Command, Limits, Mechanism, SandboxError, Setup
from megatron_gspo.rewards.sandbox.isolation import (
    GUARANTEES,
    find_interpreter,
    find_isolation,
    probe,
)
from megatron_gspo.rewards.sandbox.launcher_client import Launcher
from tests.rewards.sandbox.mechanisms import PARAMETERS, isolation_of

LIMITS = Limits(1.0, 5.0, 2**29, 8, 2**20)


def readable_interpreter():
    """One that other users can run."""
    return find_interpreter("/usr/bin/python3" if os.geteuid() == 0 else None)


@pytest.mark.parametrize("mechanism", PARAMETERS)
def test_an_isolation_has_all_guarantees(mechanism):
    interpreter, isolation = isolation_of(mechanism)
    assert isolation.guarantees == GUARANTEES
    assert isolation.describe().endswith("isolates file system, network, processes, system calls")
    without = isolation.setup._replace(system_call_filter=None)
    assert probe(without, interpreter) == ("file_system", "network", "processes")


def test_limits_alone_isolate_nothing():
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("no interpreter that other users can run")
    interpreter = readable_interpreter()
    setup = Setup(Mechanism("limits", False), interpreter.readable)
    assert probe(setup, interpreter) == ()
    launcher = Launcher(setup)
    try:
        run = Command((interpreter.executable, "-I", "-S", "main.py"), {"main.py": DAEMON}, LIMITS)
        outcome = launcher.run(run)
    finally:
        launcher.close()
    assert (outcome.ending, outcome.code) == ("exit", 0)
    # Killed, though it left its session and parent.
    assert not os.path.exists(f"/proc/{outcome.stdout.decode()}")


DAEMON = b"""
import os, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(60)
    os._exit(0)
print(os.read(reader, 100).decode(), end="", flush=True)
"""


def test_a_mechanism_that_does_not_work_is_a_sandbox_error():
    interpreter = find_interpreter()
    setup = Setup(Mechanism("bubblewrap", False), ("/no/such/path",), "/usr/bin/false")
    with pytest.raises(SandboxError, match="could not be set up"):
        probe(setup, interpreter)
    with pytest.raises(SandboxError, match="no program can be run here"):
        find_isolation(interpreter, ())


def test_without_bubblewrap_programs_are_not_isolated(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    isolation = find_isolation(find_interpreter())
    assert isolation.describe() == "limits isolates nothing"
    assert isolation.failures[0] == "bubblewrap is not installed"


def test_applications_below_usr_are_not_visible():
    readable = find_interpreter(
        "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else None
    ).readable
    assert not {"/usr", "/usr/src", "/usr/local", "/usr/share"} & set(readable)


def test_the_interpreter_is_outside_of_environments(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    interpreter = find_interpreter(str(tmp_path / "env/bin/python"))
    assert not interpreter.executable.startswith(str(tmp_path))
    assert f"{os.path.realpath(sys.base_prefix)}/lib" in interpreter.readable
    assert not any(str(tmp_path).startswith(path) for path in interpreter.readable)
