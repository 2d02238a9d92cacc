"""What the loop does about an engine that scores tokens differently: against loops in double
precision, whatever the cut into batches and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from megatron.core import parallel_state
from transformers import AutoTokenizer

from megatron_gspo.config import AlgorithmConfig, Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.rollout_correction import mismatch
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from tests.support.distributed import run_distributed
from tests.support.training_runs import base_config, first_step, tiny_model


class OtherKernels(EmbeddedEngine):
    """Returns other log-probs than it sampled with: a shift of each response, and noise of each
    token.
    """

    def generate(self, prompts, sampling, *, seed):
        return [self.disturbed(sample) for sample in super().generate(prompts, sampling, seed=seed)]

    @staticmethod
    def disturbed(sample: Sample) -> Sample:
        rng = np.random.default_rng([sample.prompt_index, sample.sample_index])
        noise = rng.normal(0, 0.3) + rng.normal(0, 0.5, sample.response_length)
        values = np.minimum(sample.rollout_log_probs + noise, 0).astype(np.float32)
        return replace(sample, rollout_log_probs=values)


def one_step(rank: int, world: int, plain: dict[str, Any]) -> tuple[list[Sample], dict[str, float]]:
    """The samples as they are trained on and the metrics of a whole step."""
    config = Config.from_dict(plain)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    return first_step(config, engine=OtherKernels(config.model.path, tokenizer=tokenizer))


def small(folder: Any, **sections: dict[str, Any]) -> dict[str, Any]:
    """One update over the whole batch of 16."""
    training = {"steps": 1, "global_batch_size": 16, "max_tokens_per_micro_batch": 4096}
    return base_config(str(folder / "model"), folder / "run", **{"training": training, **sections})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("correction")
    tiny_model(folder / "model")
    return folder


def ratio_of(sample: Sample, tokens: np.ndarray) -> float:
    """Length-normalised, in Python floats."""
    pairs = zip(sample.old_log_probs[tokens], sample.rollout_log_probs[tokens], strict=True)
    d = [float(a) - float(b) for a, b in pairs]
    return math.exp(math.fsum(d) / len(d))


def binary_kl(log_p: float, log_q: float) -> float:
    """Of "this token or another"; 1e-8 as in verl, since the others may have no probability
    left.
    """
    p = math.exp(log_p)
    q = math.exp(log_q)
    return p * (log_p - log_q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))


def kept_of(sample: Sample, algorithm: AlgorithmConfig) -> list[bool]:
    """The tokens that `rollout_rs` leaves in the loss."""
    low, high = algorithm.rollout_rs_band
    largest = algorithm.rollout_rs_divergence or math.nan
    places = np.arange(sample.response_length)
    pairs = [
        (float(a), float(b))
        for a, b in zip(sample.old_log_probs, sample.rollout_log_probs, strict=True)
    ]
    if algorithm.rollout_rs == "token":
        return [low <= math.exp(a - b) <= high for a, b in pairs]
    if algorithm.rollout_rs == "geometric":
        return [low <= ratio_of(sample, places) <= high] * len(places)
    if algorithm.rollout_rs == "token_binary_kl":
        return [max(binary_kl(a, b), binary_kl(b, a)) <= largest for a, b in pairs]
    if algorithm.rollout_rs == "sequence_k3":
        k3 = [math.exp(a - b) - 1 - (a - b) for a, b in pairs]
        return [math.fsum(k3) / len(k3) <= largest] * len(places)
    return [True] * len(places)


def expected(
    plain: list[Sample], algorithm: AlgorithmConfig
) -> tuple[list[list[bool]], list[list[float]]]:
    """(masks, advantages) of samples whose advantages are still the group's."""
    masks = []
    advantages = []
    for sample in plain:
        kept = kept_of(sample, algorithm)
        counts = [True] * len(kept) if algorithm.rollout_rs_denominator == "all" else kept
        weights = [1.0] * len(kept)
        if algorithm.rollout_is == "token":
            weights = [ratio_of(sample, np.array([t])) for t in range(len(kept))]
        elif algorithm.rollout_is == "geometric" and any(counts):
            weights = [ratio_of(sample, np.flatnonzero(counts))] * len(kept)
        low = algorithm.rollout_is_threshold_lower
        high = algorithm.rollout_is_threshold
        weights = [
            max(min(w, high), low) * (k or counts is kept)
            for w, k in zip(weights, kept, strict=True)
        ]
        masks.append(counts)
        advantages.append([float(a) * w for a, w in zip(sample.advantages, weights, strict=True)])
    return masks, advantages


def objective(masks: list[list[bool]], advantages: list[list[float]]) -> float:
    """Before an update every ratio is 1: `1/N sum_i 1/|y_i| sum_t A_it` over what is trained on."""
    means = []
    for mask, values in zip(masks, advantages, strict=True):
        chosen = [value for value, kept in zip(values, mask, strict=True) if kept]
        if chosen:
            means.append(math.fsum(chosen) / len(chosen))
    return math.fsum(means) / len(means)


SETTINGS = {
    "weights by token": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_is_threshold_lower": 0.8,
    },
    "weights by sequence": {"rollout_is": "geometric", "rollout_is_threshold": 1.1},
    "mask by token, weights by sequence": {"rollout_rs": "token", "rollout_is": "geometric"},
    "mask by sequence, weights by token": {
        "rollout_rs": "geometric",
        "rollout_rs_threshold_lower": 0.75,
        "rollout_rs_threshold": 1.35,
        "rollout_is": "token",
    },
    "icepop": {"rollout_correction_preset": "icepop"},
    "kpop, all in the denominators": {
        "rollout_rs": "token_binary_kl",
        "rollout_rs_divergence": 0.01,
        "rollout_rs_denominator": "all",
        "rollout_is": "geometric",
    },
    # the published 0.001 would leave nothing of this noise
    "k3 rejection": {
        "rollout_correction_preset": "k3_rejection_token_tis",
        "rollout_rs_divergence": 0.15,
    },
}


def steps(
    rank: int, world: int, plains: list[dict[str, Any]]
) -> list[tuple[list[Sample], dict[str, float]]]:
    """One after another in a process, which costs a fraction of a process each."""
    found = []
    for plain in plains:
        found.append(one_step(rank, world, plain))
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module", params=["gspo_token", "grpo"])
def results(request, folder) -> tuple[str, dict[str, tuple[list[Sample], dict[str, float]]]]:
    """The objective; (samples, metrics) of a step without correction, "", and of each setting."""
    chosen = {"": {}, **SETTINGS}
    plains = [
        small(folder, algorithm={"name": request.param, **setting}) for setting in chosen.values()
    ]
    return request.param, dict(zip(chosen, run_distributed(steps, 1, plains)[0], strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_against_a_naive_loop(setting, results):
    name, of = results
    (plain, before), (samples, metrics) = of[""], of[setting]
    algorithm = AlgorithmConfig.preset(name, **SETTINGS[setting])
    assert not any(key.startswith(("rollout_rs", "rollout_is")) for key in before)
    masks, advantages = expected(plain, algorithm)
    assert [sample.loss_mask.tolist() for sample in samples] == masks
    for sample, values in zip(samples, advantages, strict=True):
        kept = sample.loss_mask
        np.testing.assert_allclose(
            sample.advantages[kept], np.array(values)[kept], rtol=1e-5, atol=1e-7
        )
    assert metrics["loss"] == pytest.approx(-objective(masks, advantages), rel=1e-4, abs=1e-6)
    assert abs(metrics["loss"] - before["loss"]) > 1e-3
    if algorithm.rollout_rs != "none":
        left_of = [kept_of(sample, algorithm) for sample in plain]
        total = sum(map(len, left_of))
        left = sum(map(sum, left_of))
        assert 0 < left < total and metrics["rollout_rs/tokens"] == pytest.approx(1 - left / total)
        assert metrics["rollout_rs/sequences"] == sum(not any(kept) for kept in left_of) / 16


def test_a_minirl_step_against_a_naive_loop(folder):
    """The engine's log-probs reach the loss: some weights are truncated at 1.5, and the policy
    is still the old one.
    """
    plain = small(folder, algorithm={"name": "minirl", "max_weight": 1.5})
    [(samples, metrics)] = run_distributed(one_step, 1, plain)
    terms = []
    truncated = 0
    for sample in samples:
        for t in np.flatnonzero(sample.loss_mask):
            ratio = math.exp(float(sample.old_log_probs[t]) - float(sample.rollout_log_probs[t]))
            truncated += ratio > 1.5
            terms.append(
                min(ratio, 1.5) * float(sample.advantages[t]) * float(sample.old_log_probs[t])
            )
    assert 0 < truncated < len(terms)
    assert metrics["loss"] == pytest.approx(-math.fsum(terms) / len(samples), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", list(SETTINGS.values())[2:4], ids=list(SETTINGS)[2:4])
def test_the_cut_does_not_matter(folder, chosen):
    """Tokens packed into one micro-batch, into many, and over two ranks."""
    algorithm = {"name": "gspo_token", **chosen}
    training = {"steps": 1, "global_batch_size": 16}
    wide = small(folder, algorithm=algorithm)
    narrow = small(
        folder, algorithm=algorithm, training={**training, "max_tokens_per_micro_batch": 40}
    )
    [whole], [cut] = run_distributed(one_step, 1, wide), run_distributed(one_step, 1, narrow)
    spread = run_distributed(one_step, 2, narrow)
    context = run_distributed(one_step, 2, {**narrow, "parallel": {"context_parallel_size": 2}})
    assert whole[1]["grad_norm"] > 1e-3 and 0 < whole[1]["rollout_rs/tokens"] < 1
    assert cut[1]["perf/micro_batches"] > 4 and whole[1]["perf/micro_batches"] == 1
    for samples, metrics in (cut, *spread, *context):
        assert [s.loss_mask.tolist() for s in samples] == [s.loss_mask.tolist() for s in whole[0]]
        for name in ("loss", "grad_norm", "rollout_rs/tokens", "rollout_is/weight_mean"):
            assert metrics[name] == pytest.approx(whole[1][name], rel=2e-4, abs=1e-6), name


def test_the_rollouts_own_log_probs_are_compared_in_the_first_update(folder):
    """No pass of the old policy is made; the first mini-batch is scored by it all the same."""
    training = {"steps": 1, "global_batch_size": 4, "ppo_epochs": 2}
    own = small(folder, algorithm={"name": "gspo", "old_log_probs": "rollout"}, training=training)
    [(samples, metrics)] = run_distributed(one_step, 1, own)
    [(scored, _)] = run_distributed(one_step, 1, small(folder))
    # update.mini_batches of seed 7, step 0, epoch 0.
    rows = np.random.default_rng([7, 0, 0]).permutation(16)[:4]
    first = TrainingBatch.of([scored[i] for i in rows])
    wanted = mismatch(first, first.responses["old_log_probs"])
    assert wanted["mismatch/abs_diff"] > 0.1
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)
    assert metrics["updates"] == 8 and "time/log_probs" not in metrics and "entropy" not in metrics
