"""A launcher under each isolation: limits, streams, and what is left of a program."""

import json
import resource

import pytest

from megatron_gspo.rewards.sandbox.command import Command, Limits
from megatron_gspo.rewards.sandbox.launcher_client import Launcher
from tests.rewards.sandbox.mechanisms import PARAMETERS, descendants, isolation_of

LIMITS = Limits(1.5, 10.0, 200 * 2**20, 5, 1000, 2**21)


@pytest.fixture(scope="module", params=PARAMETERS)
def run(request):
    """Runs a Python program; run.launcher is its launcher."""
    interpreter, isolation = isolation_of(request.param)
    launcher = Launcher(isolation.setup)

    def run(program, stdin=b"", limits=LIMITS):
        argv = (interpreter.executable, "-I", "-S", "main.py")
        return launcher.run(Command(argv, {"main.py": program.encode()}, limits, stdin))

    run.launcher = launcher
    yield run
    launcher.close()


def test_the_limits_are_those_of_the_command(run):
    names = ("CPU", "AS", "FSIZE", "STACK", "NOFILE", "CORE", "MSGQUEUE", "NPROC")
    program = f"import json, resource\nprint(json.dumps([resource.getrlimit(getattr(resource, 'RLIMIT_' + n)) for n in {names}]))"  # noqa: E501
    limits = dict(zip(names, map(tuple, json.loads(run(program).stdout)), strict=True))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = 2**26 if hard == resource.RLIM_INFINITY else min(2**26, hard)
    assert limits == {
        "CPU": (2, 3),
        "AS": (200 * 2**20,) * 2,
        "FSIZE": (2**21,) * 2,
        "STACK": (stack,) * 2,
        "NOFILE": (64, 64),
        "CORE": (0, 0),
        "MSGQUEUE": (0, 0),
        "NPROC": (5, 5),
    }


def test_streams(run):
    content = bytes(range(256)) * 20_000
    program = (
        "import sys\ndata = sys.stdin.buffer.read()\nprint(len(data),"
        " sum(data))\nsys.stderr.write('e' * 9000)"
    )
    outcome = run(program, content)
    assert outcome.stdout == f"{len(content)} {sum(content)}\n".encode()
    assert outcome.stderr == b"e" * 4096
    assert (outcome.ending, outcome.code) == ("exit", 0)


def test_the_cpu_time_of_children_counts(run):
    program = (
        "import os, time\nif os.fork():\n    os.wait()\nelse:\n    while time.process_time() < 0.4:"
        " pass\n"
    )
    outcome = run(program)
    assert 0.4 <= outcome.cpu_seconds < 1.0
    assert run(program, limits=LIMITS._replace(cpu_seconds=0.3)).ending == "cpu_time"


def test_nothing_is_left_of_a_program(run):
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
    assert run(program).ending == "exit"
    assert descendants(*run.launcher.process_ids) == set()
    assert (
        run(program + "time.sleep(60)", limits=LIMITS._replace(wall_seconds=0.5)).ending
        == "wall_time"
    )
    assert descendants(*run.launcher.process_ids) == set()
