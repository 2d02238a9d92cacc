"""What is found on this machine, and that the probe sees what is not isolated."""

import os
import shutil
import subprocess
import sys

import pytest

from megatron_gspo.rewards.sandbox import isolation
from megatron_gspo.rewards.sandbox.command import SandboxError, Setup
from megatron_gspo.rewards.sandbox.isolation import GUARANTEES, find_interpreter, find_setup, probe
from tests.rewards.sandbox.mechanisms import PARAMETERS, setup_of


@pytest.mark.parametrize("privileged", PARAMETERS)
def test_an_isolation_has_all_guarantees(privileged):
    interpreter, setup = setup_of(privileged)
    assert probe(setup, interpreter) == GUARANTEES
    without = setup._replace(system_call_filter=None)
    assert probe(without, interpreter) == ("file_system", "network", "processes")


def test_less_isolation_is_refused(monkeypatch):
    monkeypatch.setattr(isolation, "system_call_filter", lambda: b"")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(isolation, "probe", lambda setup, interpreter: GUARANTEES[:2])
    message = r"cannot be isolated here \(no isolation of processes, system_calls.*\); allow namespaces .*sandbox_url"
    with pytest.raises(SandboxError, match=message):
        find_setup(find_interpreter())


def test_a_set_up_that_does_not_work_is_a_sandbox_error():
    interpreter = find_interpreter()
    with pytest.raises(SandboxError, match="could not be set up"):
        probe(Setup("/usr/bin/false", False, ("/no/such/path",)), interpreter)


def test_what_is_not_installed_is_named_with_the_fix(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed; .*apt-get install bubblewrap.*sandbox_url"):
        find_setup(find_interpreter())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(isolation, "system_call_filter", lambda: None)
    with pytest.raises(SandboxError, match=r"pyseccomp or libseccomp is missing; .*sandbox_url"):
        find_setup(find_interpreter())


def test_applications_below_usr_are_not_visible():
    readable = find_interpreter("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else None).readable
    assert not {"/usr", "/usr/src", "/usr/local", "/usr/share"} & set(readable)


def test_the_interpreter_is_outside_of_environments(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    found = find_interpreter(str(tmp_path / "env/bin/python"))
    assert not found.executable.startswith(str(tmp_path))
    assert f"{os.path.realpath(sys.base_prefix)}/lib" in found.readable
    assert not any(str(tmp_path).startswith(path) for path in found.readable)
