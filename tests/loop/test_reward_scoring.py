"""Rewards of samples: of the verifier's share on each rank, and of episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.sample_batch import SampleBatch, rows_of
from megatron_gspo.data.turn_spans import spans
from megatron_gspo.loop.reward_scoring import (
    VerifierRewards,
    balanced_scorers,
    counts_in_group,
    in_varied_group,
    require_scores,
    score_episodes,
)
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rewards.named_reward import NamedReward
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer
from megatron_gspo.rewards.source_scorers import SourceScorers
from megatron_gspo.rewards.verifiers import VerifierError
from tests.loop.episodes import episode
from tests.support.distributed import collectives_so_far, run_distributed
from tests.support.samples import ReadItems, make_prompt, make_sample


def test_a_failure_is_worth_what_the_config_says():
    failed = episode(0.5, 0.25, reward=float("nan"))
    failed.metadata[FAILURE] = "timeout: no result"
    fine = episode(1.0)
    (first, second), failures = score_episodes([failed, fine], None)
    assert failures == {"timeout": 1} and first is failed and second is fine
    (first, second), failures = score_episodes([failed, fine], -2.0)
    assert failures == {"timeout": 1} and second is fine and np.isnan(failed.reward)
    assert first.reward == -2.0 and [span.reward for span in spans(first)] == [0.0, -2.0]


def scored_on_ranks(rank: int, world: int, first: list[int]) -> tuple[list, dict, dict, list]:
    """Five samples on two ranks, of which rank 0 holds `first`; the verifier fails on every
    third text.
    """
    scored_here = []

    def verifier(response, prompt):
        assert int(response) == prompt.index
        scored_here.append(prompt.index)
        if int(response) % 3 == 0:
            raise ValueError("no multiple of three")
        return NamedReward(float(response), "odd" if int(response) % 2 else "even")

    scorer = RewardScorer.__new__(RewardScorer)
    scorer._failure_reward = None
    scorer._pool = None
    scorer._verifier = verifier
    scorer.verdicts = ("even", "odd", "none")
    scorer.description = None
    samples = [make_sample(1, 2, seed=i, text=str(i), metadata={"kept": i}) for i in range(5)]
    rewards = VerifierRewards(SourceScorers({"": scorer}), "verifier 'mine'")
    held_positions = [i for i in range(5) if (i in first) == (rank == 0)]
    batch = SampleBatch.gathered(
        [samples[i] for i in held_positions], held_positions, dist.group.WORLD
    )
    prompts = ReadItems([make_prompt(i) for i in range(5)])
    so_far = collectives_so_far()
    scored, failures = rewards(batch, prompts, Timers())
    exchanges = collectives_so_far() - so_far - 2  # without the rewards and the counts
    assert sorted(prompts.read) == sorted(scored_here), (
        "a prompt is read where its response is scored"
    )
    assert all(np.isnan(sample.reward) for sample in samples), "the given samples do not change"
    assert sorted(scored.held) == held_positions
    np.testing.assert_equal(
        [sample.reward for sample in scored.samples], scored.table["reward"][held_positions]
    )
    metadata = {i: s.metadata for i, s in scored.held.items()}
    return scored.table["reward"].tolist(), dict(failures), metadata, sorted(scored_here), exchanges


@pytest.mark.parametrize(
    ("held", "scored", "exchanges"),
    [
        ([0, 2, 3], [[0, 2, 3], [1, 4]], 0),
        ([0, 1, 2, 3], [[0, 1, 2], [3, 4]], 4),
        ([], [[3, 4], [0, 1, 2]], 4),
    ],
)
def test_each_rank_scores_a_share_and_all_get_the_rewards(held, scored, exchanges):
    """exchanges: the sizes and bytes of the texts that move, and of the reasons back."""
    first, second = run_distributed(scored_on_ranks, 2, held)
    assert repr(first[:2]) == repr(second[:2])
    assert [first[3], second[3]] == scored and first[4] == second[4] == exchanges
    rewards, failures, metadata = *first[:2], first[2] | second[2]
    np.testing.assert_equal(rewards, [np.nan, 1.0, 2.0, np.nan, 4.0])
    assert failures == {"error": 2, "invalid": 0, "timeout": 0, "even": 2, "odd": 1, "none": 0}
    assert metadata[1] == {"kept": 1}
    assert metadata[3] == {
        "kept": 3,
        FAILURE: "error: ValueError: no multiple of three",
    }


def batch_on_ranks(rank: int, world: int) -> tuple[list, list, dict]:
    """Five samples on two ranks, scored by their rank among all; the last has no reward."""
    calls = []

    def verifier(responses, prompts):
        calls.append(list(responses))
        assert [int(text) for text in responses] == [prompt.index for prompt in prompts]
        return [None if text == "4" else float(len(responses) - int(text)) for text in responses]

    scorer = RewardScorer.__new__(RewardScorer)
    scorer._failure_reward = None
    scorer._pool = None
    scorer._verifier = verifier
    scorer.verdicts = ()
    scorer.description = None
    scorer.takes_batch = True
    held_positions = [i for i in range(5) if i % 2 == rank]
    samples = [make_sample(1, 2, seed=i, text=str(i)) for i in held_positions]
    batch = SampleBatch.gathered(samples, held_positions, dist.group.WORLD)
    rewards = VerifierRewards(SourceScorers({"": scorer}), "own")
    scored, _ = rewards(batch, [make_prompt(i) for i in range(5)], Timers())
    return scored.table["reward"].tolist(), calls, {i: s.metadata for i, s in scored.held.items()}


def test_a_verifier_of_a_batch_gets_all_responses_on_one_rank():
    first, second = run_distributed(batch_on_ranks, 2)
    np.testing.assert_equal(first[0], [5.0, 4.0, 3.0, 2.0, np.nan])
    np.testing.assert_equal(second[0], first[0])
    assert first[1] == [["0", "1", "2", "3", "4"]] and second[1] == []
    assert first[2][4][FAILURE].startswith("invalid: the verifier returned") and not second[2][1]


def workers_on_ranks(rank: int, world: int) -> tuple[list[float], int]:
    """Rewards of a batch whose verifier needs all of it, and how many workers are left."""
    example = Path(__file__).parents[2] / "examples" / "own_code" / "batch_reward.py"
    with RewardScorer(f"{example}:brief_answers", timeout=60, workers=2) as scorer:
        batch = SampleBatch.gathered(
            [make_sample(1, 2, seed=rank, text="4")], [rank], dist.group.WORLD
        )
        rewards = VerifierRewards(SourceScorers({"": scorer}), "own")
        scored, _ = rewards(batch, [make_prompt(i, answer="4") for i in range(2)], Timers())
        assert scorer._pool is not None
        return scored.table["reward"].tolist(), len(scorer._pool.process_ids)


def test_only_the_rank_that_scores_a_batch_has_a_worker():
    first, second = run_distributed(workers_on_ranks, 2)
    assert np.isfinite(first[0]).all() and first[0] == second[0]
    assert (first[1], second[1]) == (1, 0)


@pytest.mark.parametrize(
    ("holders", "scorers"),
    [
        ([1, 0, 1, 0], [1, 0, 1, 0]),
        ([1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2, 0]),
        ([2, 2, 2, 2, 0], [2, 2, 0, 1, 0]),
        ([], []),
    ],
)
def test_responses_are_scored_where_they_are_unless_a_rank_holds_too_many(holders, scorers):
    assert balanced_scorers(np.array(holders, dtype=np.int32), 3).tolist() == scorers


def test_scorers_are_balanced_and_no_more_than_needed_moves():
    rng = np.random.default_rng(0)
    for size in (1, 5, 64):
        for count in (1, 63, 200):
            holders = rng.integers(0, rng.integers(1, size + 1), count)
            scorers = balanced_scorers(holders, size)
            share = -(-count // size)
            assert np.bincount(scorers, minlength=size).max() <= share
            beyond = np.maximum(np.bincount(holders, minlength=size) - share, 0).sum()
            assert (scorers != holders).sum() == beyond


def test_groups_of_equal_rewards_are_found():
    rewards = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (0.0, float("nan")), 3: (0.0, 1.0)}
    samples = [
        make_sample(1, 1, prompt_index=i, reward=value)
        for i, values in rewards.items()
        for value in values
    ]
    samples[-1].finish_reason = "abort"
    assert in_varied_group(rows_of(samples)).tolist() == [True, True] + [False] * 6
    assert counts_in_group(rows_of(samples))[4:].tolist() == [True, False, True, False]


def test_a_batch_without_any_score_is_the_verifiers_fault():
    samples = [make_sample(1, 1, metadata={FAILURE: "timeout: 2 s"}), make_sample(1, 1)]
    with pytest.raises(
        VerifierError, match=r"environment 'e' failed on all 2 responses .*timeout: 2 s\); fix it"
    ):
        require_scores(SampleBatch.of(samples), "environment 'e'", [make_prompt()])
    samples[1].reward = 0.0
    require_scores(SampleBatch.of(samples), "environment 'e'", [make_prompt()])


def test_a_source_without_any_score_is_said(caplog):
    prompts = MixedPrompts({"a": [make_prompt(0)], "b": [make_prompt(0)]})
    samples = [
        make_sample(1, 1, prompt_index=0, reward=1.0),
        make_sample(1, 1, prompt_index=1, metadata={FAILURE: "error: no file"}),
    ]
    with caplog.at_level("WARNING"):
        require_scores(SampleBatch.of(samples), "verifier 'mine'", prompts)
    assert "all 1 responses of a batch to prompts of b have no reward (the first: error: no" in (
        caplog.text
    )
