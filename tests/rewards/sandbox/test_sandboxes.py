"""Which sandbox runs the programs, and what it says where it cannot."""

import os

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox import sandboxes
from megatron_gspo.rewards.sandbox.command import Mechanism, SandboxError, Setup
from megatron_gspo.rewards.sandbox.isolation import GUARANTEES, Isolation, find_isolation
from megatron_gspo.rewards.sandbox.sandboxes import describe_lack, open_local_sandbox
from tests.rewards.sandbox.mechanisms import any_sandbox


def test_what_is_missing_is_named_with_the_fix():
    setup = Setup(Mechanism("limits", False), ())
    line = describe_lack(
        Isolation(setup, ("network", "system_calls"), ("bubblewrap: no permission",))
    )
    assert (
        line
        == "data.code.require_isolation = true: no isolation of file system, processes (bubblewrap:"
        " no permission); install bubblewrap (apt-get install bubblewrap) and allow namespaces"
        " (docs/code_rewards.md), give a Sandbox Fusion server as data.code.sandbox_url, or set"
        " it to false"
    )
    assert "install pyseccomp" in describe_lack(Isolation(setup, GUARANTEES[:3]))


def test_less_isolation_than_required_is_refused(monkeypatch):
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("no interpreter that other users can run")
    alone = (Mechanism("limits", False),)
    monkeypatch.setattr(
        sandboxes, "find_isolation", lambda interpreter: find_isolation(interpreter, alone)
    )
    with pytest.raises(
        SandboxError, match="require_isolation = true: no isolation of file system, .*to false"
    ):
        open_local_sandbox(CodeConfig(python="/usr/bin/python3"))
    sandbox = open_local_sandbox(CodeConfig(python="/usr/bin/python3", require_isolation=False))
    try:
        assert sandbox.describe().startswith("limits isolates ")
        assert "file system" not in sandbox.describe()
        assert sandbox.describe().endswith("; programs of the model can do what this user can do")
        assert sandbox.prepare("print(2 + 3)")("").stdout == b"5\n"
    finally:
        sandbox.close()


def test_an_interpreter_that_does_not_run_is_named():
    with pytest.raises(
        SandboxError,
        match="/no/python does not run as a Python interpreter .*; set data.code.python",
    ):
        open_local_sandbox(CodeConfig(python="/no/python"))


def test_a_program_has_the_configured_limits():
    sandbox = any_sandbox(time_limit=1.5, memory_mib=100, processes=3, output_mib=2)
    try:
        names = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC")
        source = (
            f"import resource\nfor n in {names}: print(resource.getrlimit(getattr(resource, n))[0])"
        )
        program = sandbox.prepare(source)
        assert program("").stdout.split() == [b"2", str(100 * 2**20).encode(), b"3"]
        assert sandbox.prepare("print('x' * 2**21)")("").ending == "output"
        assert sandbox.prepare("print(input())")("é\n").stdout == "é\n".encode()
    finally:
        sandbox.close()
