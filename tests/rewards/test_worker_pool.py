"""Worker processes: time limits, replacement, and their end."""
import gc
import os
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


def test_workers_are_reused_replaced_when_dead_and_reaped(verifier):
    with RewardScorer(verifier, timeout=5.0, workers=1) as scorer:
        first, again = run(scorer, ["pid", "pid"]).rewards
        assert first == again
        pids = scorer._pool.process_ids
        os.kill(pids[0], signal.SIGKILL)
        time.sleep(0.2)
        assert run(scorer, ["4"]).statuses == ("ok",)  # it died while idle: no response pays for that
        pids += scorer._pool.process_ids
        assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # reaped, no zombie
    with pytest.raises(RuntimeError, match="closed"):
        run(scorer, ["4"])


def test_collecting_the_scorer_ends_its_workers(verifier):
    scorer = RewardScorer(verifier, timeout=5.0)
    pids = scorer._pool.process_ids
    del scorer
    gc.collect()
    assert not any(alive(pid) for pid in pids)


SCRIPT = """
import sys, threading, time
from megatron_gspo.rewards.worker_pool import RewardPool
from tests.support.samples import make_prompt
pool = RewardPool(sys.argv[1], timeout=2.0, workers=2)
threading.Thread(target=pool.run, args=([(sys.argv[2], make_prompt())],), daemon=True).start()
time.sleep(0.3)
print(*pool.process_ids, flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(("text", "ends"), [("4", "itself"), ("sleep", "itself"), ("sleep", "killed")])
def test_no_worker_outlives_its_parent(verifier, text, ends):
    command = [sys.executable, "-c", SCRIPT, verifier, text, "0" if ends == "itself" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if ends == "killed":
            parent.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_the_kernel_ends_a_busy_worker_that_nobody_watches():
    code = (
        "import re; from megatron_gspo.rewards.worker import _cpu_time_limit as limit\n"
        "with limit(0.2): re.match('(a+)+$', 'a' * 60 + 'b')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == -signal.SIGVTALRM


def test_replacements_that_cannot_start_make_errors(tmp_path):
    """A verifier file that disappears, with the worker that had loaded it, costs rewards and not the run."""
    path = tmp_path / "judge.py"
    path.write_text(VERIFIER)
    with RewardScorer(f"{path}:judge", timeout=5.0, workers=1) as scorer:
        path.unlink()
        scores = run(scorer, ["4", "die", "4", "5"])
        assert scores.statuses == ("ok", "error", "error", "error")
        assert "exit code 7" in scores.first_messages["error"]
        assert "no such file" in run(scorer, ["4"]).first_messages["error"]
