import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_gspo.rewards.scorer import RewardScorer, score
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.rewards.worker import run_verifier
from megatron_gspo.rewards.worker_pool import RewardPool
from tests.support.samples import make_prompt, make_sample

VERIFIER = '''
import ctypes, os, re, subprocess, sys, time

def judge(text, prompt):
    """The response says what to do."""
    print("noise on standard output")
    if text == "raise": raise ValueError("no such\\nthing")
    if text == "exit": sys.exit(3)
    if text == "die": os._exit(7)
    if text == "segfault": ctypes.string_at(0)
    if text == "sleep": time.sleep(60)
    if text == "regex": return float(bool(re.match("(a+)+$", "a" * 60 + "b")))  # holds the interpreter lock
    if text == "child":
        open(prompt.metadata["file"], "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "huge": return 1e300
    if text == "string": return "1.0"
    if text == "none": return None
    if text == "bool": return True
    if text == "int": return 3
    if text == "numpy":
        import numpy
        return numpy.float32(0.25)
    if text == "torch": return float("torch" in sys.modules)
    if text == "pid": return os.getpid()
    return float(text == prompt.answer)
'''


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "judge.py"
    path.write_text(VERIFIER)
    return f"{path}:judge"


@pytest.fixture(scope="module")
def scorer(verifier):
    with RewardScorer(verifier, timeout=2.0, workers=2, failure_reward=-1.0) as scorer:
        yield scorer


def run(scorer, texts, **metadata):
    prompts = [make_prompt(0, **metadata), make_prompt(1, answer="5")]
    return scorer.score([make_sample(1, 1, seed=0, text=text) for text in texts], prompts)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_rewards_keep_their_order_and_their_prompt(scorer):
    samples = [make_sample(1, 1, seed=i % 2, text=str(4 + i % 3)) for i in range(60)]
    scores = scorer.score(samples, [make_prompt(1, answer="5"), make_prompt(0, answer="4")])
    assert scores.rewards.tolist() == [float(i % 3 == i % 2) for i in range(60)]
    assert scores.rewards.dtype == np.float32
    assert set(scores.statuses) == {"ok"} and scores.first_messages == {}
    assert scores.counts == {"error": 0, "timeout": 0, "invalid": 0}
    assert all(np.isnan(sample.reward) for sample in samples)


@pytest.mark.parametrize(("text", "reward"), [("bool", 1.0), ("int", 3.0), ("numpy", 0.25), ("torch", 0.0)])
def test_any_number_will_do_and_workers_do_without_torch(scorer, text, reward):
    assert run(scorer, [text]).rewards.tolist() == [reward]


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("raise", "error", "ValueError: no such thing"),
        ("exit", "error", "SystemExit: 3"),
        ("die", "error", "the verifier's process ended (exit code 7)"),
        ("segfault", "error", "the verifier's process ended (Segmentation fault)"),
        ("sleep", "timeout", "no result after 2 s"),
        ("regex", "timeout", "no result after 2 s"),
        ("nan", "invalid", "the verifier returned nan; return a finite number (float32)"),
        ("inf", "invalid", "the verifier returned inf; return a finite number (float32)"),
        ("huge", "invalid", "the verifier returned 1e+300; return a finite number (float32)"),
        ("string", "invalid", "the verifier returned the str '1.0'; return a number"),
        ("none", "invalid", "the verifier returned the NoneType None; return a number"),
    ],
)
def test_a_failure_is_counted_and_the_others_are_scored(scorer, text, status, message):
    scores = run(scorer, ["4", text, "4", "5"])
    assert scores.statuses == ("ok", status, "ok", "ok")
    assert scores.rewards.tolist() == [1.0, -1.0, 1.0, 0.0]
    assert scores.counts == {"error": 0, "timeout": 0, "invalid": 0} | {status: 1}
    assert scores.first_messages == {status: message}


def test_many_failures_at_once(scorer):
    texts = ["4", "die", "raise", "nan", "die", "sleep", "4", "sleep", "segfault", "5"]
    scores = run(scorer, texts)
    assert scores.counts == {"error": 4, "timeout": 2, "invalid": 1}
    assert scores.rewards.tolist() == [{"4": 1.0, "5": 0.0}.get(text, -1.0) for text in texts]


def test_a_hung_verifier_dies_with_its_children(scorer, tmp_path):
    scores = run(scorer, ["child"], file=str(tmp_path / "pid"))
    assert scores.statuses == ("timeout",)
    assert wait_until_gone([int((tmp_path / "pid").read_text())])


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
    assert wait_until_gone(pids, seconds=0)


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
    assert wait_until_gone(pids)


def test_the_kernel_ends_a_busy_worker_that_nobody_watches():
    code = (
        "import re; from megatron_gspo.rewards.worker import _processor_limit as limit\n"
        "with limit(0.2): re.match('(a+)+$', 'a' * 60 + 'b')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == -signal.SIGVTALRM


def test_in_this_process(verifier):
    with RewardScorer(verifier, timeout=None, failure_reward=0.0) as scorer:
        scores = run(scorer, ["4", "raise", "exit", "nan", "pid"])
    assert scores.statuses == ("ok", "error", "error", "invalid", "ok")
    assert scores.rewards[:4].tolist() == [1.0, 0.0, 0.0, 0.0] and scores.rewards[4] == os.getpid()


def test_a_failure_has_no_reward_unless_it_is_given_one(verifier):
    with RewardScorer(verifier, timeout=None) as scorer:
        scores = run(scorer, ["4", "raise", "nan"])
    assert scores.rewards[0] == 1.0 and np.isnan(scores.rewards[1:]).all()
    assert scores.messages == (
        "", "ValueError: no such thing", "the verifier returned nan; return a finite number (float32)"
    )


def test_score_once():
    scores = score([make_sample(1, 1, text="4")], [make_prompt()], "exact_match", timeout=5.0)
    assert scores.rewards.tolist() == [1.0]
    assert score([], [], "exact_match", timeout=None).rewards.shape == (0,)


def test_bad_use(tmp_path):
    with pytest.raises(ValueError, match="sample 7/0: its prompt was not given"):
        score([make_sample(1, 1, seed=7)], [make_prompt()], "exact_match", timeout=None)
    with pytest.raises(ValueError, match="failure_reward is nan"):
        RewardScorer("exact_match", failure_reward=float("nan"))
    with pytest.raises(ValueError, match="timeout is 0"):
        RewardPool("exact_match", timeout=0)
    with pytest.raises(ValueError, match="workers is 0"):
        RewardPool("exact_match", timeout=1, workers=0)
    (tmp_path / "bad.py").write_text("1 / 0")
    for timeout in (None, 5.0):
        with pytest.raises(VerifierError, match="ZeroDivisionError: division by zero"):
            RewardScorer(f"{tmp_path}/bad.py:f", timeout=timeout)


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


def test_run_verifier_shortens_messages():
    def verifier(text, prompt):
        raise ValueError("x" * 10_000 + "\n")

    status, value, message = run_verifier(verifier, "", make_prompt())
    assert (status, value, len(message)) == ("error", None, 300)
