"""A launcher's process: what it loads, that it is replaced, and its end."""

import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.rewards.sandbox.command import Command, Limits
from megatron_gspo.rewards.sandbox.launcher_client import Launcher
from tests.rewards.sandbox.mechanisms import MECHANISMS, PARAMETERS, descendants, isolation_of
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def ready():
    """(setup, interpreter) of the first mechanism that works."""
    for mechanism in MECHANISMS:
        try:
            interpreter, isolation = isolation_of(mechanism)
        except pytest.skip.Exception:
            continue
        return isolation.setup, interpreter.executable
    pytest.skip("no isolation on this machine")


def program(python, source, seconds=10.0):
    limits = Limits(5.0, seconds, 2**28, 8, 2**20)
    return Command((python, "-I", "-S", "main.py"), {"main.py": source.encode()}, limits)


def test_it_has_no_environment_and_few_modules(ready):
    code = (
        "import sys, megatron_gspo.rewards.sandbox.launcher\n"
        "print({'numpy', 'torch', 'yaml', 'megatron_gspo.config'} & set(sys.modules))"
    )
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
    printed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", path + code], capture_output=True, check=True
    )
    assert printed.stdout == b"set()\n"
    setup, python = ready
    launcher = Launcher(setup)
    launcher.run(program(python, "pass"))
    assert Path(f"/proc/{launcher.process_ids[0]}/environ").read_bytes() == b""
    launcher.close()


@pytest.mark.parametrize("started", [1, 3])
@pytest.mark.parametrize("mechanism", PARAMETERS)
def test_its_programs_end_with_it(mechanism, started):
    """Also where it is killed, as with a verifier that exceeds its time: at any moment.

    started: processes at that moment, of the launcher, the sandbox's first process and those below.
    """
    interpreter, isolation = isolation_of(mechanism)
    command = program(interpreter.executable, "import time; time.sleep(50)", 60.0)
    if started > 1:  # the set-up of the sandbox takes longer than the test's next step
        command = command._replace(files={**command.files, "large": bytes(30_000_000)})
    script = (
        "import sys, pickle\nfrom megatron_gspo.rewards.sandbox.launcher_client import Launcher\n"
        "setup, command = pickle.loads(sys.stdin.buffer.read())\nlauncher = Launcher(setup)\n"
        "launcher.run(command)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    worker.stdin.write(pickle.dumps((isolation.setup, command)))
    worker.stdin.close()
    wait_for(lambda: len(descendants(worker.pid)) >= started, pause=0.001)
    running = descendants(worker.pid)
    worker.kill()
    worker.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running), 20)


def test_it_ends_with_its_object(ready):
    setup, python = ready
    launcher = Launcher(setup)
    launcher.run(program(python, "pass"))
    (pid,) = launcher.process_ids
    del launcher
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
