"""Units of work: how items are grouped, what is reported, and what a failure or a dead process
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_gspo.errors import InputError, RunError
from megatron_gspo.tools.convert.work_units import Unit, Workers, run_units


def fail_on_two(number):
    if number == 2:
        raise InputError("unit 2 is broken")
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_failure_is_raised_and_earlier_results_are_recorded(processes):
    recorded = []
    with pytest.raises(InputError, match="unit 2 is broken"):
        run_units(
            fail_on_two,
            [Unit(n, 1, n) for n in range(4)],
            Workers(processes),
            record=lambda number, result: recorded.append(number),
        )
    assert 2 not in recorded and (processes > 1 or recorded == [0, 1])


def kill_itself(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_one_line():
    with pytest.raises(RunError, match="a process of the conversion was killed") as caught:
        run_units(kill_itself, [Unit(n, 1, n) for n in range(2)], Workers(2))
    assert "fewer --processes" in str(caught.value) and "\n" not in str(caught.value)


def print_pid_and_wait(_):
    print(os.getpid(), flush=True)
    time.sleep(600)


def test_workers_end_when_the_conversion_is_killed():
    script = (
        "from megatron_gspo.tools.convert.work_units import Unit, Workers, run_units\nfrom"
        " tests.tools.convert.test_work_units import"
        " print_pid_and_wait\nrun_units(print_pid_and_wait, [Unit(number, 1, None) for number in"
        " range(2)], Workers(2))\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True
    ) as conversion:
        workers = [psutil.Process(int(conversion.stdout.readline())) for _ in range(2)]
        conversion.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]
