"""Rewards of samples: of the verifier's share on each rank, and of episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.data.sample_batch import SampleBatch, rows_of
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import (
    VerifierRewards,
    counts_in_group,
    in_varied_group,
    require_scores,
    score_episodes,
)
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rewards.named_reward import NamedReward
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer
from megatron_gspo.rewards.verifiers import VerifierError
from tests.loop.episodes import episode
from tests.support.distributed import run_distributed
from tests.support.samples import make_prompt, make_sample


def test_a_failure_is_worth_what_the_config_says():
    failed = episode(0.5, 0.25, reward=float("nan"))
    failed.metadata[FAILURE] = "timeout: no result"
    fine = episode(1.0)
    (first, second), failures = score_episodes([failed, fine], None)
    assert failures == {"timeout": 1} and first is failed and second is fine
    (first, second), failures = score_episodes([failed, fine], -2.0)
    assert failures == {"timeout": 1} and second is fine and np.isnan(failed.reward)
    assert first.reward == -2.0 and [span.reward for span in spans(first)] == [0.0, -2.0]


def scored_on_ranks(rank: int, world: int) -> tuple[list, dict, list]:
    """Five samples on two ranks; the verifier fails on every third text."""

    def verifier(response, prompt):
        if int(response) % 3 == 0:
            raise ValueError("no multiple of three")
        return NamedReward(float(response), "odd" if int(response) % 2 else "even")

    scorer = RewardScorer.__new__(RewardScorer)
    scorer._failure_reward, scorer._pool, scorer._verifier = None, None, verifier
    scorer.verdicts = ("even", "odd", "none")
    samples = [make_sample(1, 2, seed=i, text=str(i), metadata={"kept": i}) for i in range(5)]
    rewards = VerifierRewards(scorer, "verifier 'mine'")
    mine = [i for i in range(5) if i % 3 % world == rank]  # rank 0 has 0, 2, 3
    batch = SampleBatch.gathered([samples[i] for i in mine], mine, dist.group.WORLD)
    scored, failures = rewards(batch, [make_prompt(i) for i in range(5)], Timers())
    assert all(np.isnan(sample.reward) for sample in samples), "the given samples do not change"
    assert sorted(scored.held) == mine
    np.testing.assert_equal([sample.reward for sample in scored.samples], scored.table["reward"][mine])
    return scored.table["reward"].tolist(), dict(failures), {i: s.metadata for i, s in scored.held.items()}


def test_each_rank_scores_a_share_and_all_get_the_rewards():
    first, second = run_distributed(scored_on_ranks, 2)
    assert repr(first[:2]) == repr(second[:2])
    rewards, failures, metadata = *first[:2], first[2] | second[2]
    np.testing.assert_equal(rewards, [np.nan, 1.0, 2.0, np.nan, 4.0])
    assert failures == {"error": 2, "invalid": 0, "timeout": 0, "even": 2, "odd": 1, "none": 0}
    assert metadata[1] == {"kept": 1} and metadata[3] == {
        "kept": 3, FAILURE: "error: ValueError: no multiple of three",
    }  # fmt: skip


def test_groups_of_equal_rewards_are_found():
    rewards = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (0.0, float("nan")), 3: (0.0, 1.0)}
    samples = [make_sample(1, 1, prompt_index=i, reward=value) for i, values in rewards.items() for value in values]
    samples[-1].finish_reason = "abort"
    assert in_varied_group(rows_of(samples)).tolist() == [True, True] + [False] * 6
    assert counts_in_group(rows_of(samples))[4:].tolist() == [True, False, True, False]


def test_a_batch_without_any_score_is_the_verifiers_fault():
    samples = [make_sample(1, 1, metadata={FAILURE: "timeout: 2 s"}), make_sample(1, 1)]
    with pytest.raises(VerifierError, match=r"environment 'e' failed on all 2 responses .*timeout: 2 s\); fix it"):
        require_scores(SampleBatch.of(samples), "environment 'e'")
    samples[1].reward = 0.0
    require_scores(SampleBatch.of(samples), "environment 'e'")
