"""Worker processes: time limits, replacement, and their end."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_gspo.rewards.scorer import RewardScorer
from tests.rewards.conftest import VERIFIER
from tests.support.scored_responses import run
from tests.support.waiting import wait_for


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hung_verifier_dies_with_its_children(scorer, tmp_path):
    scores = run(scorer, ["child"], file=str(tmp_path / "pid"))
    assert scores.statuses == ("timeout",)
    wait_for(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_a_daemon_in_a_session_of_its_own_ends_with_the_worker(verifier, tmp_path):
    with RewardScorer(verifier, timeout=60) as scorer:
        assert run(scorer, ["daemon"], file=str(tmp_path / "pid")).rewards.tolist() == [1.0]
        daemon = int((tmp_path / "pid").read_text())
        assert alive(daemon)
    assert not alive(daemon)


def test_output_is_shown_in_whole_lines_without_control_characters(verifier, capfd):
    with RewardScorer(verifier, timeout=60) as scorer:
        run(scorer, ["print"])
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "verifier: noise on standard output",
        r"verifier: half a line\x1b[2J on stderr",
    ]


def test_a_verifier_that_hangs_is_named_with_its_prompt_and_the_seconds_left(verifier, capfd):
    with RewardScorer(verifier, timeout=3.0) as scorer:
        assert run(scorer, ["4", "sleep"]).statuses == ("ok", "timeout")
    lines = [line for line in capfd.readouterr().err.splitlines() if "so far" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"warning: verifier '.*judge.py:judge': a response to prompt 0 takes \d s so far and is ended in"
        r" \d s; "
        r"1 of 2 are done",
        lines[0],
    )


def test_a_worker_that_leaks_memory_is_replaced_and_no_response_pays_for_it(
    verifier, monkeypatch, capfd
):
    monkeypatch.setattr("megatron_gspo.rewards.worker_pool._MAX_GROWTH", 150 << 20)
    with RewardScorer(verifier, timeout=60.0) as scorer:
        scores = run(scorer, ["leak"] * 6)
    assert scores.statuses == ("ok",) * 6
    pids = scores.rewards.tolist()  # 64 MiB each: the fourth is 192 MiB above the first
    assert len(set(pids[:4])) == 1 and len(set(pids[3:])) == 2
    assert "verifier: its process has grown by 192" in capfd.readouterr().err


def test_workers_are_reused_replaced_when_dead_and_reaped(verifier):
    with RewardScorer(verifier, timeout=60, workers=1) as scorer:
        first, again = run(scorer, ["pid", "pid"]).rewards
        assert first == again
        pids = scorer._pool.process_ids
        os.kill(pids[0], signal.SIGKILL)
        time.sleep(0.2)
        # It died while idle: no response pays for that.
        assert run(scorer, ["4"]).statuses == ("ok",)
        pids += scorer._pool.process_ids
        assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # reaped, no zombie
    with pytest.raises(RuntimeError, match="closed"):
        run(scorer, ["4"])


def test_workers_start_with_the_requests_that_need_them(verifier):
    with RewardScorer(verifier, timeout=60, workers=3) as scorer:
        pool = scorer._pool
        assert len(pool.process_ids) == 1
        assert run(scorer, ["4", "4"]).statuses == ("ok", "ok")
        assert len(pool.process_ids) == 2
        released = pool.process_ids
        scorer.release()
        assert pool.process_ids == [] and not any(alive(pid) for pid in released)
        assert run(scorer, ["4"] * 5).statuses == ("ok",) * 5
        assert len(pool.process_ids) == 3


def test_collecting_the_scorer_ends_its_workers(verifier):
    scorer = RewardScorer(verifier, timeout=60)
    pids = scorer._pool.process_ids
    del scorer
    gc.collect()
    assert not any(alive(pid) for pid in pids)


SCRIPT = """
import sys, threading, time
from megatron_gspo.rewards.worker_pool import RewardPool
from tests.support.samples import make_prompt
pool = RewardPool(sys.argv[1], timeout=2.0, workers=2)
threading.Thread(target=pool.run, args=([(sys.argv[2], make_prompt())] * 2,), daemon=True).start()
time.sleep(0.3)
print(*pool.process_ids, flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("text", "ends"),
    [("sleep", "itself"), ("regex", "killed")],
)
def test_no_worker_outlives_its_parent(verifier, text, ends):
    command = [sys.executable, "-c", SCRIPT, verifier, text, "0" if ends == "itself" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if ends == "killed":
            parent.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))


DAEMON_SCRIPT = """
import sys, time
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.worker_pool import RewardPool
pool = RewardPool(sys.argv[1], timeout=60)
prompt = Prompt(0, None, "", metadata={"file": sys.argv[2]})
assert pool.run([("daemon", prompt)])[0].status == "ok"
print("ready", flush=True)
time.sleep(60)
"""


def test_a_daemon_ends_after_sigkill_of_the_trainer(verifier, tmp_path):
    command = [sys.executable, "-c", DAEMON_SCRIPT, verifier, str(tmp_path / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        daemon = int((tmp_path / "pid").read_text())
        assert alive(daemon)
        parent.kill()
    wait_for(lambda: not alive(daemon))


def test_replacements_that_cannot_start_make_errors(tmp_path):
    """A verifier file that disappears, with the worker that had loaded it, costs rewards and
    not the run.
    """
    path = tmp_path / "judge.py"
    path.write_text(VERIFIER)
    with RewardScorer(f"{path}:judge", timeout=60, workers=1) as scorer:
        path.unlink()
        scores = run(scorer, ["4", "die", "4", "5"])
        assert scores.statuses == ("ok", "error", "error", "error")
        assert "exit code 7" in scores.messages[1]
        assert "no such file" in run(scorer, ["4"]).messages[0]
