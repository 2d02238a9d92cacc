"""tools/serve.py: what it prints, passes on, and leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.tools.serve import main
from tests.servers.conftest import plan
from tests.support.interrupts import hear_interrupts


@contextmanager
def serving(launch: SGLangLaunch, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "megatron_gspo.tools.serve", "--model", launch.model]
    command += [
        "--python",
        launch.python,
        "--log-dir",
        launch.log_dir,
        "--sglang.device",
        "cpu",
        *more,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_the_urls_passes_arguments_on_and_leaves_nothing(stand_in, ending):
    extra = (
        "--servers",
        "2",
        "--sglang.host",
        "0.0.0.0",
        "--sglang.mem-fraction-static=0.7",
        "--advertise",
        "node7",
    )
    with serving(stand_in, *extra) as process:
        line = process.stdout.readline().strip()
        assert line.startswith("sglang.urls=[http://node7:") and line.count("http://node7:") == 2
        children = psutil.Process(process.pid).children(recursive=True)
        servers = [child.cmdline() for child in children if "-m" in child.cmdline()[:3]]
        assert len(servers) == 2
        for command in servers:
            assert command[-5:] == [
                "--device",
                "cpu",
                "--host",
                "0.0.0.0",
                "--mem-fraction-static=0.7",
            ]
        process.send_signal(ending)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "open to other machines without a key" in said and "Traceback" not in said
    assert not [
        child.pid
        for child in children
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_server_that_cannot_start_is_told_in_a_line(stand_in):
    plan(stand_in, "exit")
    with serving(stand_in) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("megatron-gspo serve: sglang server 0") and said.count("\n") == 1
    assert "could not begin: no reason given" in said


def test_wrong_values_are_told_in_a_line(stand_in, tmp_path, capsys):
    empty = tmp_path / "key"
    empty.write_text("\n")
    before = signal.getsignal(signal.SIGTERM)
    try:
        for more, words in (
            (["--api-key-file", str(empty)], "its first line is empty"),
            (["--api-key-file", "/no/key"], "cannot be read (FileNotFoundError)"),
            (["--sglang.api-key", "visible"], "--api-key is reserved"),
        ):
            assert main(["--model", stand_in.model, *more]) == 2
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1 and "visible" not in said
    finally:
        signal.signal(signal.SIGTERM, before)
