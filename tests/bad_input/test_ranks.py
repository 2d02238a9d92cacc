"""Ranks that die, hang or fail alone: the others end soon with the reason, and no process is
left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bad_input.ranks import run_ranks
from tests.support.command_line import Case, small_config
from tests.support.sglang_generator import Generator
from tests.support.waiting import wait_for

VERIFIER = Path(__file__).with_name("broken_verifier.py")
LOST = "lost contact with another rank ("
CASES = (
    Case(
        "rank killed",
        LOST,
        code=1,
        shows=("it died or hung, its log has the reason; ", "start again"),
    ),
    Case("rank that hangs", LOST, code=1, shows=("Timed out waiting 10000ms",)),
    Case(
        "disk full on one rank",
        "cannot be written: file too large",
        code=1,
        shows=("rank 0: ", "metrics.jsonl"),
    ),
    Case(
        "verifier that fails on one node",
        "); fix it",
        shows=("rank 1: ", "this node lacks a package"),
    ),
    Case(
        "stopped by a scheduler",
        "stopped by SIGTERM, as a scheduler does",
        code=143,
        shows=("start again",),
    ),
)
KILLED, HANGS, FULL, LACKS, STOPPED = CASES


def broken(model: str, folder: Path, rank: int, how: str, **sections: Any) -> dict[str, Any]:
    options = {"verifier": f"{VERIFIER}:score", "verifier_options": {"rank": rank, "how": how}}
    config = small_config(model, folder, data=options, training={"steps": 3}, **sections)
    return config


def say(case: Case, text: str) -> bool:
    """Whether exactly one line reports a case, without a traceback."""
    lines = [line for line in text.splitlines() if re.match("(config )?error: ", line)]
    return (
        len(lines) == 1
        and all(phrase in lines[0] for phrase in (case.phrase, *case.shows))
        and "Traceback" not in text
    )


def test_a_rank_that_is_killed(model, tmp_path):
    """On machines of their own, without torchrun: the broken connection ends the others at once."""
    config = broken(model, tmp_path, 1, "kill", parallel={"distributed_timeout_minutes": 5.0})
    first, killed, last = run_ranks(config, 3, tmp_path, limit=290)
    assert killed.code == -signal.SIGKILL
    for rank in (first, last):
        assert rank.code == 1 and say(KILLED, rank.text), rank
        assert rank.seconds - killed.seconds < 120


def kill_when(condition: Callable[[], bool], log: Path) -> None:
    """Kill the process whose error stream is `log`, once the condition holds."""
    wait_for(condition, 290)
    for stream in Path("/proc").glob("[0-9]*/fd/2"):
        with contextlib.suppress(OSError):
            if stream.readlink() == log:
                os.kill(int(stream.parts[2]), signal.SIGKILL)


def test_a_client_that_is_killed_while_it_waits_for_responses(model, tmp_path):
    """Each of two ranks waits for its group; no server answers any more."""
    with Generator() as server, ThreadPoolExecutor(1) as pool:
        server.gate = False
        config = small_config(
            model,
            tmp_path,
            rollout={"engine": "sglang"},
            training={"steps": 3},
            sglang={
                "urls": [server.url],
                "weight_transport": "tensor",
                "log_prob_check_at_start": False,
            },
            parallel={"distributed_timeout_minutes": 5.0},
        )
        waits = pool.submit(kill_when, lambda: len(server.bodies) == 8, tmp_path / "rank_1.txt")
        first, killed = run_ranks(config, 2, tmp_path, limit=290)
        waits.result()
    assert killed.code == -signal.SIGKILL
    assert first.code == 1 and say(KILLED, first.text), first
    assert first.seconds - killed.seconds < 120


def test_a_rank_that_hangs(model, tmp_path):
    """Stopped in a step: the others wait for timeout_minutes, here ten seconds, and then end."""
    config = broken(model, tmp_path, 1, "stop", parallel={"distributed_timeout_minutes": 1 / 6})
    first, hangs, last = run_ranks(config, 3, tmp_path, limit=290, patience=2.0)
    assert hangs.code is None
    for rank in (first, last):
        assert rank.code == 1 and say(HANGS, rank.text), rank


@pytest.mark.parametrize("case", [FULL, LACKS], ids=lambda case: case.name)
def test_one_rank_fails_and_all_say_its_reason(case, model, tmp_path):
    """Long before a collective would time out: the reason travels through the store."""
    config = broken(model, tmp_path, 0, "full disk", parallel={"distributed_timeout_minutes": 5.0})
    if case is LACKS:
        verifier = tmp_path / "verify.py"
        lacks = "this node lacks a package"
        fails = f'import os\nif os.environ["RANK"] == "1":\n    raise ImportError("{lacks}")\n'
        verifier.write_text(fails + "def score(text, prompt): return 1.0\n")
        config["data"] |= {"verifier": f"{verifier}:score", "verifier_options": {}}
    ranks = run_ranks(config, 3, tmp_path, limit=290)
    for rank in ranks:
        assert rank.code == case.code and say(case, rank.text), rank
    assert max(rank.seconds for rank in ranks) - min(rank.seconds for rank in ranks) < 120


def torchrun(config: dict[str, Any], folder: Path, processes: int) -> subprocess.Popen[str]:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*command, "-m", "megatron_gspo.train", str(folder / "config.yaml")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def members(session: int) -> list[int]:
    """Living processes of a session."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, sid = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(sid) == session and state != "Z":
                pids.append(int(folder.name))
    return pids


def test_under_torchrun_a_dead_rank_ends_all_and_one_line_says_it(model, tmp_path):
    started = torchrun(broken(model, tmp_path, 1, "kill"), tmp_path, 2)
    try:
        text, _ = started.communicate(timeout=600)
        assert started.returncode != 0
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and (LOST in lines[0] or STOPPED.phrase in lines[0]), text[-3000:]
        wait_for(lambda: not members(started.pid), 60, pause=0.1)
    finally:
        for process in members(started.pid):
            os.kill(process, signal.SIGKILL)


def test_a_scheduler_that_stops_a_run_gets_one_line(model, tmp_path):
    config = broken(model, tmp_path, 0, "terminate")
    [alone] = run_ranks(config, 1, tmp_path, limit=290)
    assert alone.code == STOPPED.code and say(STOPPED, alone.text), alone


def test_torchruns_report_ends_with_our_line(model, tmp_path):
    started = torchrun(small_config(model, tmp_path, training={"stepz": 3}), tmp_path, 2)
    text, _ = started.communicate(timeout=600)
    assert started.returncode == 1
    ours = next(line for line in text.splitlines() if line.startswith("config error: "))
    *_, last, end = text.splitlines()
    assert "training.stepz" in ours and last.strip() == f"traceback : {ours}" and set(end) == {"="}


def test_ranks_whose_output_nobody_reads_train_to_the_end(model, tmp_path):
    started = torchrun(small_config(model, tmp_path, training={"steps": 2}), tmp_path, 2)
    assert started.stdout is not None
    started.stdout.close()
    assert started.wait(timeout=600) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "summary.json").exists()
