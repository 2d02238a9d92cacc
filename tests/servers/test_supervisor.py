"""The supervisor of a server: it ends with either of the two and removes a secret from the
output.
"""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from megatron_gspo.servers import supervisor
from tests.servers.conftest import running
from tests.support.waiting import wait_for

KEY = 'it\'s \\ "secret" \u00e9'


def test_the_supervisor_hides_a_key_however_it_is_written():
    """Whole, in pieces, as Python and JSON spell it, in lines longer than what is kept back;
    all else passes.
    """
    program = (
        f"import json, os, sys, time\nkey = {KEY!r}\n"
        "long = 'x' * 200_000 + key + 'y' * 70_000 + '\\n'\n"
        "texts = [key, repr(key), key + key + ' ', long, 'bar\\r' + key, json.dumps(key)]\n"
        "for data in map(str.encode, texts):\n"
        "    for piece in (data[:3], data[3:-2], data[-2:]):\n"
        "        while piece: piece = piece[os.write(1, piece):]\n"
        "        time.sleep(0.02)\n"
        "sys.exit(5)\n"
    )
    server = [sys.executable, "-S", "-c", program]
    command = [sys.executable, "-I", "-S", supervisor.__file__, "--hide", str(os.getpid()), *server]
    done = subprocess.run(
        command, start_new_session=True, timeout=30, input=KEY.encode(), capture_output=True
    )
    wanted = f"***'***'****** {'x' * 200_000}***{'y' * 70_000}\nbar\r***\"***\""
    assert (done.returncode, done.stdout.decode(), done.stderr) == (5, wanted, b"")


def test_a_server_ends_with_its_supervisor():
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), *sleep]
    process = subprocess.Popen(command, start_new_session=True)
    server = wait_for(lambda: psutil.Process(process.pid).children())
    wait_for(lambda: server[0].cmdline()[1:] == sleep[1:])  # it has begun
    process.kill()
    process.wait()
    wait_for(lambda: not running(server))


@pytest.mark.parametrize(
    "program, code", [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_supervisor_ends_as_its_server_does(program, code):
    command = [
        sys.executable,
        "-I",
        "-S",
        supervisor.__file__,
        str(os.getpid()),
        sys.executable,
        "-S",
        "-c",
        program,
    ]
    assert subprocess.run(command, start_new_session=True, timeout=30).returncode == code


def test_the_supervisor_of_a_trainer_that_is_gone_starts_nothing(tmp_path):
    touched = tmp_path / "touched"
    command = [sys.executable, "-I", "-S", supervisor.__file__, "1", "touch", str(touched)]
    assert subprocess.run(command, start_new_session=True, timeout=30).returncode == 1
    assert not touched.exists()
