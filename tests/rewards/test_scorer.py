import os

import numpy as np
import pytest

from megatron_gspo.rewards.scorer import RewardScorer, score
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.rewards.worker_pool import RewardPool
from tests.support.samples import make_prompt, make_sample
from tests.support.scored_responses import run


def test_rewards_keep_their_order_and_their_prompt(scorer):
    samples = [make_sample(1, 1, seed=i % 2, text=str(4 + i % 3)) for i in range(60)]
    scores = scorer.score(samples, [make_prompt(1, answer="5"), make_prompt(0, answer="4")])
    assert scores.rewards.tolist() == [float(i % 3 == i % 2) for i in range(60)]
    assert scores.rewards.dtype == np.float32
    assert set(scores.statuses) == {"ok"} and set(scores.messages) == {""}
    assert scores.counts == {"error": 0, "timeout": 0, "invalid": 0}
    assert all(np.isnan(sample.reward) for sample in samples)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("bool", 1.0), ("int", 3.0), ("numpy", 0.25), ("torch", 0.0), ("tensor", 1.0), ("score", 0.5)],
)
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
        ("array", "invalid", "the verifier returned the ndarray array([1., 1.]); return a number"),
        (
            "no score",
            "invalid",
            (
                "the verifier returned the dict {'acc': True}; return a number, or a dictionary"
                ' with "score"'
            ),
        ),
        ("base", "error", "BaseException: rare"),
        ("no text", "error", "Mute"),
        ("escape", "error", "ValueError: \\x1b]0;title\\x07 \\x1b[31mred"),
        ("none", "invalid", "the verifier returned the NoneType None; return a number"),
    ],
)
def test_a_failure_is_counted_and_the_others_are_scored(scorer, text, status, message):
    scores = run(scorer, ["4", text, "4", "5"])
    assert scores.statuses == ("ok", status, "ok", "ok")
    assert scores.rewards.tolist() == [1.0, -1.0, 1.0, 0.0]
    assert scores.counts == {"error": 0, "timeout": 0, "invalid": 0} | {status: 1}
    assert scores.messages == ("", message, "", "")


def test_in_this_process(verifier):
    with RewardScorer(verifier, timeout=None, failure_reward=0.0) as scorer:
        scores = run(scorer, ["4", "raise", "exit", "nan", "pid"])
    assert scores.statuses == ("ok", "error", "error", "invalid", "ok")
    assert scores.rewards[:4].tolist() == [1.0, 0.0, 0.0, 0.0] and scores.rewards[4] == os.getpid()


def test_a_verifier_that_hangs_in_this_process_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megatron_gspo.rewards.scorer._NOTICE_SECONDS", 0.1)
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef score(text, prompt):\n    time.sleep(0.35)\n    return 1.0\n")
    with RewardScorer(f"{path}:score", timeout=None) as scorer:
        assert run(scorer, ["4"]).rewards.tolist() == [1.0]
    line = capsys.readouterr().err.splitlines()[0]
    assert (
        line
        == f"warning: verifier '{path}:score': a response to prompt 0 takes 0 s so far, without a time"
        " limit; 0 of 1 are done"
    )


def test_a_failure_has_no_reward_unless_it_is_given_one(verifier):
    with RewardScorer(verifier, timeout=None) as scorer:
        scores = run(scorer, ["4", "raise", "nan"])
    assert scores.rewards[0] == 1.0 and np.isnan(scores.rewards[1:]).all()
    assert scores.messages == (
        "",
        "ValueError: no such thing",
        "the verifier returned nan; return a finite number (float32)",
    )


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
