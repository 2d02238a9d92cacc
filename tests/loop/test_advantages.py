"""Advantages of responses and turns, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.advantages import shaped_rewards, with_advantages, with_turn_advantages
from tests.loop.episodes import episode
from tests.support.random_samples import trained_samples
from tests.support.samples import make_sample


def test_penalties_are_charged_to_the_last_turn():
    batch = TrainingBatch.of(
        [episode(0.0, 1.0), episode(1.0, 0.0), episode(0.5, 0.0, reward=float("nan"))]
    )
    shaped = np.array([1.0, 0.0, np.nan])  # one off the second
    algorithm = AlgorithmConfig.preset(name="gspo_token", turn_discount=0.5, advantage_std="none")
    samples = trained_samples(with_turn_advantages(batch, shaped, algorithm))
    # returns 1/2, 1 and 1 - 1/2, -1
    np.testing.assert_allclose(samples[0].advantages, [0, 0, 0, 1, 1])
    np.testing.assert_allclose(samples[1].advantages, [0, 0, 0, -1, -1])
    assert samples[2].advantages.tolist() == [0] * 5 and samples[2].advantages.dtype == np.float32


def scored(*rewards: float, **fields) -> list:
    """Samples of one group, responses of three tokens."""
    return [
        make_sample(1, 3, seed=i, prompt_index=0, reward=reward, **fields)
        for i, reward in enumerate(rewards)
    ]


def test_a_response_has_one_advantage():
    samples = scored(1.0, 0.0, 0.0, 1.0)
    estimated = trained_samples(
        with_advantages(
            TrainingBatch.of(samples),
            AlgorithmConfig.preset(advantage_std="none"),
            max_response_length=9,
        )
    )
    assert [sample.advantages.tolist() for sample in estimated] == [
        [v] * 3 for v in (0.5, -0.5, -0.5, 0.5)
    ]
    assert all(sample.advantages.dtype == np.float32 for sample in estimated)
    assert samples[0].advantages.tolist() != estimated[0].advantages.tolist(), (
        "the given samples do not change"
    )


def test_the_branches_of_a_run_do_not_weigh_in_its_group():
    """Eight runs of one to six rows have the advantages of eight responses."""
    rng = np.random.default_rng(0)
    rewards = rng.random(8).tolist()
    runs = []
    for number, reward in enumerate(rewards):
        row_lengths = rng.integers(2, 6, number % 6 + 1)
        mask = np.zeros(row_lengths.sum() - 1, dtype=bool)
        mask[0] = True
        run = make_sample(1, len(mask), prompt_index=0, mask=mask, row_lengths=row_lengths)
        runs.append(replace(run, sample_index=number, reward=reward))
    algorithm = AlgorithmConfig.preset()
    advantages = [
        {float(sample.advantages[0]) for sample in trained_samples(estimated)}
        for estimated in (
            with_advantages(TrainingBatch.of(samples), algorithm, max_response_length=99)
            for samples in (runs, scored(*rewards))
        )
    ]
    assert advantages[0] == advantages[1] and len(advantages[0]) == 8


def test_a_reward_that_is_not_known_moves_no_baseline():
    samples = scored(1.0, 0.0, float("nan"), 7.0)
    samples[3].finish_reason = "abort"
    estimated = trained_samples(
        with_advantages(
            TrainingBatch.of(samples),
            AlgorithmConfig.preset(advantage_std="none"),
            max_response_length=9,
        )
    )
    assert [sample.advantages[0] for sample in estimated] == [0.5, -0.5, 0.0, 0.0]


def test_supervised_training_weights_every_token_by_one():
    estimated = trained_samples(
        with_advantages(
            TrainingBatch.of(scored(float("nan"))),
            AlgorithmConfig.preset("sft"),
            max_response_length=9,
        )
    )
    assert estimated[0].advantages.tolist() == [1.0] * 3


def test_the_reward_is_reduced_by_length_and_kl():
    samples = scored(1.0, 1.0)
    samples[1] = make_sample(
        1, 8, seed=1, prompt_index=0, reward=1.0, mask=[True] * 4 + [False] * 4
    )
    algorithm = AlgorithmConfig.preset(
        truncated="penalize", overlong_buffer_len=4, overlong_penalty_factor=2.0
    )
    np.testing.assert_allclose(
        shaped_rewards(TrainingBatch.of(samples), algorithm, max_response_length=8), [1.0, -1.0]
    )
    algorithm = AlgorithmConfig.preset(kl_reward_coef=0.5, kl_loss_type="k1", advantage_std="none")
    kl = [float((s.old_log_probs - s.ref_log_probs)[s.loss_mask].sum()) for s in samples]
    estimated = trained_samples(
        with_advantages(TrainingBatch.of(samples), algorithm, max_response_length=8)
    )
    np.testing.assert_allclose(estimated[0].advantages, 0.5 * (kl[1] - kl[0]) / 2, rtol=1e-5)
    np.testing.assert_allclose(estimated[1].advantages, 0.5 * (kl[0] - kl[1]) / 2, rtol=1e-5)
