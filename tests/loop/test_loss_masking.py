"""Which samples count in the loss, by the first reason that applies."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import RunError
from megatron_gspo.loop.loss_masking import mask_samples
from tests.support.random_samples import trained_samples
from tests.support.samples import make_sample

NAN = float("nan")


def sample(seed: int, **fields):
    return make_sample(1, 3, seed=seed, **({"reward": 1.0} | fields))


def non_finite(value: float, **fields):
    made = sample(0, **fields)
    made.old_log_probs[1] = value
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (sample(0), None),
        (sample(0, mask=[False] * 3, reward=NAN), "empty"),
        (sample(0, finish_reason="abort", reward=NAN), "truncated"),
        (sample(0, reward=NAN), "unscored"),
        (non_finite(-np.inf), "non_finite"),
        (non_finite(NAN, mask=[True, False, True]), None),
    ],
)
def test_the_first_reason_counts(made, reason):
    batch, counts = mask_samples(TrainingBatch.of([made, sample(1)]), step=0, truncated=False)
    samples = trained_samples(batch)
    assert batch.table["trained"].tolist() == [int(s.loss_mask.sum()) for s in samples]
    assert counts == {
        f"masked/{name}": float(name == reason)
        for name in ("empty", "truncated", "unscored", "non_finite")
    }
    assert samples[1].loss_mask.all()
    if reason is None:
        assert samples[0].loss_mask.tolist() == made.loss_mask.tolist()
    else:
        assert not samples[0].loss_mask.any() and samples[0].loss_mask.shape == (3,)
    assert reason == "empty" or made.loss_mask.any(), "the given sample does not change"


def test_cut_off_responses_are_masked_on_request():
    cut = sample(0, finish_reason="length")
    assert (
        mask_samples(TrainingBatch.of([cut]), step=0, truncated=False)[1]["masked/truncated"] == 0.0
    )
    batch, counts = mask_samples(TrainingBatch.of([cut]), step=0, truncated=True)
    [masked] = trained_samples(batch)
    assert counts["masked/truncated"] == 1.0 and not masked.loss_mask.any()


def test_no_finite_log_prob_at_all_ends_the_run():
    broken = [non_finite(NAN), non_finite(NAN, reward=NAN), sample(1, mask=[False] * 3)]
    with pytest.raises(RunError, match="step 3: no response has finite log-probs"):
        mask_samples(TrainingBatch.of(broken), step=2, truncated=False)


@pytest.mark.parametrize(
    "finite", [sample(1), sample(1, reward=NAN), sample(1, finish_reason="length")]
)
def test_a_response_with_finite_log_probs_shows_that_the_weights_are_not_broken(finite):
    batch = TrainingBatch.of([non_finite(NAN), finite])
    _, counts = mask_samples(batch, step=2, truncated=True)
    assert counts["masked/non_finite"] == 1.0
