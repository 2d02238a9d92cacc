"""How local servers are watched, with a program in sglang's place (conftest.py) that ends, hangs or
answers.

What matters here is the process and its end, not what it serves; tests/sglang does the same with
real servers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers import server_processes as servers
from megatron_gspo.servers.server_processes import LocalServers
from tests.servers.conftest import plan, running, with_config
from tests.support.waiting import wait_for


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts follow each other without the pauses that a real server deserves."""
    monkeypatch.setattr(servers, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(servers, "_RESTART_SECONDS", 0.01)


@pytest.fixture
def started(stand_in: SGLangLaunch, quick: None) -> Iterator[LocalServers]:
    with LocalServers(stand_in) as made:
        yield made


def group_of(url: str) -> list[psutil.Process]:
    port = url.rsplit(":", 1)[1]
    guards = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "supervisor.py" in " ".join(p.info["cmdline"] or [])
    ]
    guards_of_server = [process for process in guards if port in process.info["cmdline"]]
    return [
        member
        for process in guards_of_server
        for member in (process, *process.children(recursive=True))
    ]


def server_of(url: str) -> psutil.Process:
    return next(process for process in group_of(url) if "-m" in process.cmdline()[:3])


def test_a_stop_leaves_no_process(started):
    group = group_of(started.urls[0])
    assert len(group) == 3  # supervisor, server, the server's child
    assert not started.poll()
    started.stop()
    assert not running(group)
    started.stop()  # may be called again


def test_a_server_that_ends_is_started_again_at_its_url_and_its_children_are_gone(started):
    url = started.urls[0]
    old = group_of(started.urls[0])
    os.kill(server_of(url).pid, signal.SIGKILL)
    assert wait_for(started.poll).died == [url]
    assert wait_for(started.poll).restarted == [url]
    assert started.urls == [url] and not running(old) and len(group_of(url)) == 3


def test_a_server_that_does_not_answer_is_started_again_on_request(started):
    url = started.urls[0]
    os.kill(server_of(url).pid, signal.SIGSTOP)
    assert not started.poll()
    started.restart(url)
    changes = wait_for(started.poll)
    changes = changes if changes.restarted else wait_for(started.poll)
    assert changes.restarted == [url]


def test_it_is_given_up_after_as_many_restarts_as_it_may_have(started):
    url = started.urls[0]
    plan(started.launch, "exit")
    os.kill(server_of(url).pid, signal.SIGKILL)
    seen = []
    while not seen or not seen[-1].given_up:
        seen.append(wait_for(started.poll))
    assert [url] in [changes.died for changes in seen] and seen[-1].given_up == [url]
    log = started.logs[0].read_text()
    assert log.count("could not begin") == started.max_restarts == 3
    time.sleep(0.2)
    assert not started.poll() and not group_of(url)


def test_a_server_that_ends_at_once_is_named_with_its_words_and_ends_the_others(
    stand_in, quick, tmp_path
):
    plan(stand_in, "exit")
    many = with_config(stand_in, num_servers=2)
    launcher = LocalServers(many)
    with pytest.raises(EngineError) as error:
        launcher.start()
    assert "exited with code 1; the end of its log: could not begin: no reason given; see " in str(
        error.value
    )
    assert str(tmp_path / "logs" / "server_") in str(error.value) and "\n" not in str(error.value)
    assert launcher.urls == []


@pytest.mark.parametrize("state", ["hang", "ill"])
def test_a_server_that_never_answers_is_given_start_timeout(stand_in, quick, state):
    plan(stand_in, state)
    with pytest.raises(EngineError, match="did not answer within sglang.start_timeout"):
        LocalServers(with_config(stand_in, start_timeout=0.5)).start()


def test_a_port_that_is_taken_in_between_is_left_for_another_unless_it_was_asked_for(
    stand_in, quick
):
    plan(stand_in, "port")
    with LocalServers(stand_in) as running_servers:
        text = running_servers.logs[0].read_text()
        taken = text.split("'127.0.0.1', ")[1].split(")")[0]
        assert not running_servers.urls[0].endswith(taken)
    plan(stand_in, "port")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(EngineError, match="its port is in use; choose another sglang.port"):
        LocalServers(with_config(stand_in, port=port)).start()


def test_the_key_goes_by_a_file_that_is_removed_when_read(stand_in, quick, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "key").write_text("k-secret\n")
    with LocalServers(with_config(stand_in, api_key_file=str(tmp_path / "key"))) as launcher:
        wait_for(lambda: '--config True\nsettings api-key: "***"\n' in launcher.logs[0].read_text())
        assert not any(
            "k-secret" in " ".join(process.cmdline()) for process in group_of(launcher.urls[0])
        )
        assert not list(tmp_path.glob("sglang-*.yaml"))
        assert launcher.logs[0].stat().st_mode & 0o077 == 0
        launcher.logs[0].write_text("server_args: api_key='k-secret'")
        line = launcher._exit_line(launcher._processes[0], 1)
        assert "k-secret" not in line and "***" in line


def test_servers_end_when_the_trainer_is_killed(stand_in):
    program = (
        "import time\nfrom megatron_gspo.config import ServerConfig\n"
        "from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch\n"
        "from megatron_gspo.servers.server_processes import LocalServers\n"
        f"print(LocalServers({stand_in!r}).start()[0], flush=True)\ntime.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        group = group_of(trainer.stdout.readline().strip())
        assert len(running(group)) == 3
    finally:
        trainer.kill()
        trainer.communicate()
    wait_for(lambda: not running(group))
