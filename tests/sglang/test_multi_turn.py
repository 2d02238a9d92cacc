"""Episodes on a real server: the contexts of later turns are in its cache, and what they yield
must still be exact.
"""

from __future__ import annotations

from pathlib import Path

from tests.sglang.test_training import AGREEMENT, run
from tests.support.ties import FLIPS
from tests.support.training_runs import check_ledger
from tests.train.test_multi_turn import ROLLOUT


def test_episodes_on_two_ranks(sglang_url: str, sglang_model: str, tmp_path: Path) -> None:
    """Log-probs and experts of every generated token are those of the trainer's one pass over
    the whole episode.
    """
    steps = run(
        sglang_model,
        tmp_path / "run",
        [sglang_url],
        2,
        parallel={"expert_model_parallel_size": 2},
        rollout=ROLLOUT,
        data={"verifier": None, "verifier_timeout": 20.0},
        routing={"replay": "r3"},
        algorithm={"name": "gspo_token", "turn_discount": 0.5},
        training={"steps": 3},
        evaluation={"at_start": False},
    )
    assert len(steps) == 3
    for record in steps:
        assert (
            1 < record["turns/mean"] <= record["turns/max"] <= 3
            and record["turns/observation_tokens"] > 10
        )
        assert (
            record["mismatch/abs_diff_max"] < AGREEMENT
            and record["routing/rollout_flip_rate"] < FLIPS
        )
        assert record["staleness/max"] == 0.0
        # this server's draws aren't seeded: a step in which no episode earned anything has nothing
        # to learn from
        assert record["grad_norm"] > 0 or record["groups/zero_variance"] == 1.0
        assert record["rollout/requests"] > 16, "one a turn"
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=0)
