"""Which sandbox runs the programs, and what it says where it cannot."""


import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.sandboxes import open_local_sandbox
from tests.rewards.sandbox.mechanisms import any_sandbox


def test_an_interpreter_that_does_not_run_is_named():
    with pytest.raises(SandboxError, match="/no/python does not run as a Python interpreter .*; set data.code.python"):
        open_local_sandbox(CodeConfig(python="/no/python"))


def test_a_program_has_the_configured_limits():
    sandbox = any_sandbox(time_limit=1.5, memory_mib=100, processes=3, output_mib=2)
    try:
        names = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC")
        source = f"import resource\nfor n in {names}: print(resource.getrlimit(getattr(resource, n))[0])"
        program = sandbox.prepare(source)
        assert program("").stdout.split() == [b"2", str(100 * 2**20).encode(), b"3"]
        assert sandbox.prepare("print('x' * 2**21)")("").ending == "output"
        assert sandbox.prepare("print(input())")("é\n").stdout == "é\n".encode()
    finally:
        sandbox.close()
