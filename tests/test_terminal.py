"""Output that nobody reads, and a terminal that hangs up, end no program."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.errors import RunError
from megatron_gspo.terminal import get_logger, logged_to

PROGRAM = """
import logging, sys, warnings
from megatron_gspo.terminal import outlive_terminal
outlive_terminal()
outlive_terminal()
logging.basicConfig()
for i in range(3000):
    print("line", i, flush=i % 2 == 0)
    print("line", i, file=sys.stderr)
    logging.warning("line %d", i)
    warnings.warn(f"line {i}", stacklevel=1)
sys.stdout.write("an unfinished line")
open(sys.argv[1], "w").write("reached")
sys.exit(3)
"""


def run(folder: Path, **streams: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(folder / "reached")]
    done = subprocess.run(command, timeout=120, **streams)  # type: ignore[call-overload]
    assert (folder / "reached").exists() and done.returncode == 3
    return done


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_pipe_whose_reader_has_ended(closed, unbuffered, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    others = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    names = ["stdout", "stderr"] if closed == "both" else [closed]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = run(tmp_path, **{**others, **dict.fromkeys(names, writing)}, env=environment)
    os.close(writing)
    shown = (done.stdout or b"") + (done.stderr or b"")
    assert b"Exception ignored" not in shown
    assert b"Traceback" not in shown
    assert b"Logging error" not in shown
    if closed == "stderr":
        assert done.stdout.endswith(b"line 2999\nan unfinished line"), (
            "what can be written still is"
        )


def test_a_full_disk(tmp_path):
    with open("/dev/full", "wb") as full:
        run(tmp_path, stdout=full, stderr=full)


def test_closed_descriptors_are_given_to_no_other_file(tmp_path):
    file = tmp_path / "reached"
    opens = 'opened = open(sys.argv[1], "w"); assert opened.fileno() > 2; opened'
    program = PROGRAM.replace('open(sys.argv[1], "w")', opens)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(file)]
    )
    assert done.returncode == 3 and file.read_text() == "reached"


def test_a_terminal_that_hangs_up(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        waits = PROGRAM.replace(
            "for i in", "print('ready', flush=True)\nimport time; time.sleep(0.5)\nfor i in"
        )
        os.execv(sys.executable, [sys.executable, "-c", waits, str(tmp_path / "reached")])
    os.read(terminal, 5)  # it ignores the signal by now
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3 and (tmp_path / "reached").exists()


def test_what_is_read_arrives_whole_through_a_slow_pipe_that_does_not_block(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "reached")]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL) as process:
        os.close(writing)
        with os.fdopen(reading, "rb") as reader:
            text = reader.read().decode()
    assert process.returncode == 3
    assert text == "".join(f"line {i}\n" for i in range(3000)) + "an unfinished line"


def test_records_are_lines_on_the_standard_error_of_the_moment(capsys: pytest.CaptureFixture[str]):
    """Also of a stream that came after the logger, as a progress bar's; without control
    characters, and not a second time by the handlers of the root logger.
    """
    logger = get_logger("megatron_gspo.tests.terminal")
    assert get_logger("megatron_gspo.tests.terminal") is logger
    root = logging.getLogger()
    again = logging.StreamHandler(sys.stderr)
    root.addHandler(again)
    try:
        logger.info("100 % of \x1b[31mred")
        logger.warning("two\nlines")
        logger.debug("not shown")
    finally:
        root.removeHandler(again)
    assert capsys.readouterr().err == "100 % of \\x1b[31mred\nwarning: two\\nlines\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_record_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch):
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed):
        monkeypatch.setattr("sys.stderr", stream)
        get_logger("megatron_gspo.tests.terminal").warning("lost")


def test_records_are_lines_of_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger("megatron_gspo.tests")
    file = tmp_path / "logs" / "rank_3.jsonl"
    with logged_to(file, "debug", rank=3):
        logger.debug("loads\n%s", "rollen \u2028")
        try:
            raise ValueError("a bug")
        except ValueError:
            logger.exception("failed")
    with logged_to(file, "error", rank=3):
        logger.info("not written")
        logger.error("written")
    logger.debug("not written")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["message"] for record in records] == [
        "loads\nrollen \u2028",
        "failed",
        "written",
    ]
    assert [record["level"] for record in records] == ["debug", "error", "error"]
    assert all(record["rank"] == 3 for record in records)
    assert records[0]["logger"] == "megatron_gspo.tests" and records[0]["time"].endswith("+00:00")
    assert records[1]["traceback"].splitlines()[-1] == "ValueError: a bug"
    shown = capsys.readouterr().err
    assert shown.splitlines() == ["loads\\nrollen \\u2028", "failed", "written"]


def test_the_error_that_ends_a_run_is_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rank_0.jsonl"
    for error in (RunError("no server"), RuntimeError("a bug")):
        with pytest.raises(type(error)), logged_to(file, "info"):
            raise error
    user, bug = (json.loads(line) for line in file.read_text().splitlines())
    assert user["message"] == "RunError: no server" and "traceback" not in user
    assert bug["message"] == "RuntimeError: a bug" and "raise error" in bug["traceback"]
    assert capsys.readouterr().err == ""  # whoever catches it prints it


def test_a_full_disk_loses_lines_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "rank_0.jsonl"
    full.symlink_to("/dev/full")
    with logged_to(full, "info"):
        get_logger("megatron_gspo.tests").info("goes on")
    assert capsys.readouterr().err == "goes on\n"
