"""Advantages from a value model: where rewards are earned, by hand, and their normalisation
over all samples.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.config import AlgorithmConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.advantages import with_advantages
from megatron_gspo.loop.gae import with_gae
from tests.loop.episodes import episode
from tests.support.random_samples import trained_samples
from tests.support.samples import make_sample


def ppo(**fields: object) -> AlgorithmConfig:
    return AlgorithmConfig.preset("ppo", **{"advantage_std": "none", "lam": 1.0, **fields})


def sample(values: list[float], *, seed: int = 0, **fields: object) -> Sample:
    fields = {"reward": 1.0, "values": np.array(values, dtype=np.float32), **fields}
    return make_sample(1, len(values), seed=seed, **fields)


def estimated(samples: list[Sample], algorithm: AlgorithmConfig) -> list[Sample]:
    batch = TrainingBatch.of(samples)
    return trained_samples(with_advantages(batch, algorithm, max_response_length=9))


def test_the_reward_is_earned_at_the_last_trained_token():
    (estimate,) = estimated([sample([0.5, 9.0, 0.25, 7.0], mask=[True, False, True, False])], ppo())
    assert estimate.advantages.tolist() == [0.5, 0, 0.75, 0]
    assert estimate.returns.tolist() == [1.0, 9.0, 1.0, 7.0]  # its own values at untrained tokens
    assert estimate.advantages.dtype == estimate.returns.dtype == np.float32


def test_observations_are_no_steps_of_the_trajectory():
    """The next value is that of the next trained token: deltas 0.25 - 0.5 and 1 - 0.25."""
    (estimate,) = estimated([sample([0.5, 9.0, 0.25], mask=[True, False, True])], ppo(lam=0.0))
    assert estimate.advantages.tolist() == [-0.25, 0, 0.75]


def test_the_kl_is_charged_token_by_token():
    given = sample([0.0, 0.0, 0.0], mask=[True, True, False])
    (estimate,) = estimated([given], ppo(kl_reward_coef=0.5, kl_loss_type="k1"))
    kl = 0.5 * (given.old_log_probs - given.ref_log_probs)
    np.testing.assert_allclose(estimate.advantages, [1 - kl[0] - kl[1], 1 - kl[1], 0], rtol=1e-6)


def valued(rewards: tuple[float, ...], values: list[float], **fields: object) -> Sample:
    given = episode(*rewards, **fields)
    given.values = np.array(values, dtype=np.float32)
    return given


def test_turns_earn_their_rewards_at_their_last_token():
    """Turns of tokens 0 and 1, and 3 and 4; token 2 is an observation."""
    given = valued((2.0, 1.0), [0.0] * 5)
    (estimate,) = estimated([given], ppo())
    first, second = [list(range(turn["start"], turn["end"])) for turn in given.metadata["turns"]]
    assert estimate.returns[first].tolist() == [3.0] * len(first)
    assert estimate.returns[second].tolist() == [1.0] * len(second)


def test_an_advantage_for_each_turn():
    """Values at the turns' first tokens 0.5 and 0.25; deltas 2 + 0.5 * 0.25 - 0.5 and 1 - 0.25;
    lam 1.
    """
    given = valued((2.0, 1.0), [0.0] * 5)
    first, second = [range(turn["start"], turn["end"]) for turn in given.metadata["turns"]]
    given.values[first[0]], given.values[second[0]] = 0.5, 0.25
    (estimate,) = estimated([given], ppo(turn_discount=0.5))
    assert estimate.advantages[list(second)].tolist() == [0.75] * len(second)
    assert estimate.advantages[list(first)].tolist() == [1.625 + 0.5 * 0.75] * len(first)
    assert estimate.returns[second[0]] == 1.0 and estimate.returns[first[0]] == 2.5


def test_penalties_are_charged_at_the_end():
    algorithm = ppo(truncated="penalize", overlong_buffer_len=4, overlong_penalty_factor=2.0)
    (estimate,) = estimated([sample([0.0] * 9)], algorithm)
    assert estimate.returns.tolist() == [-1.0] * 9
    # One off 3.
    penalised = with_gae(TrainingBatch.of([valued((2.0, 1.0), [0.0] * 5)]), np.array([2.0]), ppo())
    assert penalised.responses["returns"][-1] == 0.0


def test_a_reward_that_is_not_known_trains_neither_model():
    given = [
        sample([0.5, 0.25], reward=float("nan")),
        sample([0.0, 0.0], seed=1, finish_reason="abort"),
    ]
    for estimate in estimated([*given, sample([0.0, 0.5], seed=2)], ppo(advantage_std="sample"))[
        :2
    ]:
        assert estimate.advantages.tolist() == [0, 0]
        assert estimate.returns.tolist() == estimate.values.tolist()


@pytest.mark.parametrize(("std", "freedom"), [("sample", 1), ("population", 0)])
def test_advantages_are_normalised_over_all_trained_tokens(std, freedom):
    given = [
        sample([0.0, 0.5], mask=[True, True]),
        sample([3.0, 1.0], seed=1, mask=[True, False], reward=0.0),
        sample([9.0], seed=2, reward=float("nan")),
    ]
    raw = np.concatenate(
        [estimates.advantages[estimates.loss_mask] for estimates in estimated(given[:2], ppo())]
    )
    assert raw.tolist() == [1.0, 0.5, -3.0]
    estimates = estimated(given, ppo(advantage_std=std))
    expected = (raw - raw.mean()) / raw.std(ddof=freedom)
    np.testing.assert_allclose(estimates[0].advantages, expected[:2], rtol=1e-6)
    np.testing.assert_allclose(estimates[1].advantages, [expected[2], 0], rtol=1e-6)
    assert estimates[2].advantages.tolist() == [0]


def test_equal_advantages_and_a_batch_without_any_are_zero():
    assert estimated([sample([0.0, 0.0])], ppo(advantage_std="sample"))[0].advantages.tolist() == [
        0,
        0,
    ]
    assert estimated([sample([1.0], mask=[False])], ppo(advantage_std="sample"))[
        0
    ].advantages.tolist() == [0]


def test_samples_together_are_estimated_as_alone():
    """With a sample that does not count and one without trained tokens."""
    rng = np.random.default_rng(0)
    given = [
        make_sample(
            1,
            n,
            seed=i,
            values=rng.normal(size=n).astype(np.float32),
            reward=float(i),
            prompt_index=0,
        )
        for i, n in enumerate((3, 70, 1, 5, 2))
    ]
    given[2].reward = float("nan")
    given[3].loss_mask[:] = False
    together = estimated(given, ppo(gamma=0.9, lam=0.5))
    for sample, estimate in zip(given, together, strict=True):
        (alone,) = estimated([sample], ppo(gamma=0.9, lam=0.5))
        np.testing.assert_allclose(estimate.advantages, alone.advantages, rtol=0, atol=1e-6)
        np.testing.assert_allclose(estimate.returns, alone.returns, rtol=0, atol=1e-6)
    assert not together[2].advantages.any()
    assert together[2].returns.tolist() == given[2].values.tolist()
    assert not together[3].advantages.any()
    assert together[3].returns.tolist() == given[3].values.tolist()
    assert together[1].advantages.any() and together[4].returns[-1] == 4.0
