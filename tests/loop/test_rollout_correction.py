"""The mismatch between the engines and its correction, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.config import AlgorithmConfig, ConfigError
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
from megatron_gspo.loop.rollout_correction import correct_mismatch, mismatch
from tests.support.random_samples import assert_same, trained_samples
from tests.support.samples import make_sample


def corrected(
    samples: list[Sample], algorithm: AlgorithmConfig
) -> tuple[list[Sample], dict[str, float]]:
    batch, metrics = correct_mismatch(TrainingBatch.of(samples), algorithm)
    return trained_samples(batch), metrics


def two_samples() -> list[Sample]:
    """Ratios old policy / rollout engine 3, 1/4, 1 (the third not trained) and 1.5, 1.5."""
    first = make_sample(1, 3, mask=[True, True, False], log_probs=False)
    second = make_sample(1, 2, log_probs=False)
    for sample, ratios in ((first, (3, 0.25, 1)), (second, (1.5, 1.5))):
        sample.rollout_log_probs = np.full(len(ratios), -2, np.float32)
        sample.old_log_probs = (sample.rollout_log_probs + np.log(ratios)).astype(np.float32)
        sample.advantages = np.full(len(ratios), -2, np.float32)
    return [first, second]


def test_weights_by_hand():
    (first, second), metrics = corrected(two_samples(), AlgorithmConfig.preset(rollout_is="token"))
    np.testing.assert_allclose(first.advantages, [-4, -0.5, -2])
    np.testing.assert_allclose(second.advantages, [-3, -3], rtol=1e-6)
    total = 2 + 0.25 + 3
    squares = 4 + 0.0625 + 4.5
    assert metrics == pytest.approx(
        {
            "rollout_is/weight_mean": total / 4,
            "rollout_is/weight_min": 0.25,
            "rollout_is/weight_max": 2.0,
            "rollout_is/effective_sample_size": total**2 / squares / 4,
            "rollout_is/truncated": 0.25,
        }
    )


@pytest.mark.parametrize(
    ("denominator", "mask", "advantages"),
    [("kept", [True, False, False], [-6, -6, -6]), ("all", [True, True, False], [-6, 0, -6])],
)
def test_the_weight_of_a_sequence_is_that_of_the_tokens_left(denominator, mask, advantages):
    algorithm = AlgorithmConfig.preset(
        rollout_rs="token",
        rollout_rs_threshold=4.0,
        rollout_rs_threshold_lower=0.5,
        rollout_rs_denominator=denominator,
        rollout_is="geometric",
        rollout_is_threshold=5.0,
    )
    (first, second), metrics = corrected(two_samples(), algorithm)
    assert first.loss_mask.tolist() == mask and second.loss_mask.all()
    np.testing.assert_allclose(first.advantages, advantages, rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [-3, -3], rtol=1e-6)
    assert metrics["rollout_rs/tokens"] == 0.25 and metrics["rollout_rs/sequences"] == 0
    assert metrics["rollout_is/weight_mean"] == pytest.approx((3 + 1.5) / 2)


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_a_rejected_sequence_has_no_weight(denominator):
    algorithm = AlgorithmConfig.preset(
        rollout_rs="geometric",
        rollout_rs_threshold=1.2,
        rollout_rs_denominator=denominator,
        rollout_is="geometric",
    )
    (first, second), metrics = corrected(two_samples(), algorithm)
    np.testing.assert_allclose(first.advantages, [-2 * 0.75**0.5] * 3, rtol=1e-6)
    assert second.loss_mask.any() == (denominator == "all")
    assert denominator == "kept" or not second.advantages.any()
    assert metrics["rollout_is/weight_max"] == pytest.approx(0.75**0.5)


def test_weights_that_are_all_0_have_an_effective_sample_size_of_0():
    samples = two_samples()
    for sample in samples:
        sample.old_log_probs -= 200
    _, metrics = corrected(samples, AlgorithmConfig.preset(rollout_is="token"))
    assert metrics["rollout_is/weight_max"] == metrics["rollout_is/effective_sample_size"] == 0


def test_excluded_tokens_may_stay_in_the_denominators():
    """IcePop: the weight inside the band and 0 outside; loss_mask, |y_i|, N and M are as they
    were.
    """
    (first, second), metrics = corrected(
        two_samples(), AlgorithmConfig.preset(rollout_correction_preset="icepop")
    )
    np.testing.assert_allclose(first.advantages, [-6, 0, -2], rtol=1e-6)  # ratios 3, 1/4, untrained
    np.testing.assert_allclose(second.advantages, [-3, -3], rtol=1e-6)
    assert first.loss_mask.tolist() == [True, True, False] and second.loss_mask.all()
    assert first.advantages.dtype == np.float32
    assert metrics["rollout_rs/tokens"] == 0.25 and metrics["rollout_rs/sequences"] == 0
    assert metrics["rollout_is/weight_min"] == pytest.approx(1.5), "of the tokens left"


@pytest.mark.parametrize(
    ("settings", "advantages", "centred"),
    [
        ({}, [-2, -2], [-2, -2]),
        ({"rollout_is": "token"}, [-4, -0.5], [-2, -2]),
        ({"rollout_correction_preset": "icepop"}, [-6, 0], [-2, -2]),
        ({"rollout_is": "geometric"}, [-2 * 0.75**0.5] * 2, [-2 * 0.75**0.5] * 2),
    ],
)
def test_centering_has_the_advantages_before_weights_by_token(settings, advantages, centred):
    """Of the first sample. The engine's two most likely ids have 5/8 and 1/8."""
    samples = two_samples()
    for sample in samples:
        shape = (sample.response_length, 2)
        sample.rollout_top_ids = np.zeros(shape, np.int32)
        shares = np.full(shape, [0.625, 0.125])
        sample.rollout_top_log_probs = np.log(shares).astype(np.float32)
    algorithm = AlgorithmConfig.preset("grpo", score_centering=2, **settings)
    batch, metrics = correct_mismatch(TrainingBatch.of(samples), algorithm)
    for name, expected in (("advantages", advantages), ("centering_advantages", centred)):
        column = batch.responses.of_sample(name, 0)
        assert column.dtype == np.float32
        np.testing.assert_allclose(column[:2], expected, rtol=1e-6)
    assert metrics["score_centering/top_k_mass"] == pytest.approx(0.75)


def test_centering_without_the_engines_ids_is_refused():
    algorithm = AlgorithmConfig.preset("grpo", score_centering=2)
    with pytest.raises(ConfigError, match="score_centering = 2: the engine gives no log-probs of"):
        corrected(two_samples(), algorithm)
    samples = two_samples()
    samples[0].rollout_top_ids = np.zeros((3, 2), np.int32)
    samples[0].rollout_top_log_probs = np.full((3, 2), -1, np.float32)
    with pytest.raises(ValueError, match="rollout_top_ids is missing from 1 of 2 samples"):
        TrainingBatch.of(samples)


def test_nothing_left_has_no_weights():
    algorithm = AlgorithmConfig.preset(
        rollout_rs="token", rollout_rs_threshold=1.0, rollout_is="token"
    )
    samples, metrics = corrected(two_samples(), algorithm)
    assert metrics == {"rollout_rs/tokens": 1.0, "rollout_rs/sequences": 1.0}
    samples, metrics = corrected(samples, algorithm)
    assert metrics == {"rollout_rs/tokens": 0.0, "rollout_rs/sequences": 0.0}
    unchanged, metrics = corrected(samples, AlgorithmConfig.preset())
    assert metrics == {}
    for sample, before in zip(unchanged, samples, strict=True):
        assert_same(sample, before)


def test_the_samples_that_are_given_do_not_change():
    samples = two_samples()
    corrected(samples, AlgorithmConfig.preset(rollout_rs="token", rollout_is="token"))
    for sample, before in zip(samples, two_samples(), strict=True):
        assert sample.loss_mask.tolist() == before.loss_mask.tolist()
        assert sample.advantages.tolist() == before.advantages.tolist()


def test_without_log_probs_it_is_refused():
    samples = two_samples()
    samples[1].rollout_log_probs = None
    samples[0].rollout_log_probs = None
    assert mismatch(TrainingBatch.of(samples), np.zeros(5, dtype=np.float32), {}) == {}
    for key in ("rollout_rs", "rollout_is"):
        refusal = f'algorithm.{key} = "token": the engine gives no log-probs; set it to none'
        with pytest.raises(ConfigError, match=refusal):
            corrected(samples, AlgorithmConfig.preset(**{key: "token"}))


def measured_mismatch(batch: TrainingBatch, log_probs: np.ndarray) -> dict[str, float]:
    """All figures, with the quantiles."""
    ratios: dict[str, RatioHistogram] = {}
    metrics = mismatch(batch, log_probs, ratios)
    return metrics | quantiles_over_ranks(ratios, batch)


def test_mismatch_quantiles_of_both_ratios():
    samples = two_samples()
    batch = TrainingBatch.of(samples)
    metrics = measured_mismatch(batch, batch.responses["old_log_probs"])
    assert metrics["mismatch/ratio_token/max"] == pytest.approx(3)
    assert metrics["mismatch/ratio_token/min"] == pytest.approx(0.25)
    assert metrics["mismatch/ratio_sequence/min"] == pytest.approx(math.sqrt(3 / 4))
    assert metrics["mismatch/ratio_sequence/max"] == pytest.approx(1.5)
    assert metrics["mismatch/abs_diff_max"] == pytest.approx(math.log(4))
    assert len(metrics) == 14


def test_mismatch_does_not_depend_on_the_pieces(monkeypatch):
    samples = [make_sample(2, n, seed=n, mask=[n != 4] * n) for n in range(1, 7)]
    batch = TrainingBatch.of(samples)
    log_probs = batch.responses["old_log_probs"].copy()
    whole = measured_mismatch(batch, log_probs)
    monkeypatch.setattr("megatron_gspo.data.columns._PIECE", 7)
    assert len(list(batch.responses.pieces())) > 3
    assert measured_mismatch(batch, log_probs) == pytest.approx(whole, rel=1e-12)
    log_probs[0] = np.nan
    assert math.isnan(mismatch(batch, log_probs, {})["mismatch/abs_diff_max"])


def test_minirl_needs_the_engines_log_probs_and_changes_no_advantage():
    samples = two_samples()
    left, metrics = corrected(samples, AlgorithmConfig.preset("minirl"))
    assert metrics == {}
    for sample, before in zip(left, samples, strict=True):
        assert_same(sample, before)
    without = [make_sample(1, 2, log_probs=False)]
    with pytest.raises(
        ConfigError, match='algorithm.name = "minirl": the engine gives no log-probs'
    ):
        corrected(without, AlgorithmConfig.preset("minirl"))
