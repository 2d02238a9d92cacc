"""What the loop does about an engine that scores tokens differently, whatever the cut into batches
and ranks. Weights and masks themselves are in `tests/algorithms/test_importance_sampling.py` and
`tests/loop/test_rollout_correction.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
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


def objective(masks: list[list[bool]], advantages: list[list[float]]) -> float:
    """Before an update every ratio is 1: `1/N sum_i 1/|y_i| sum_t A_it` over what is trained on."""
    means = []
    for mask, values in zip(masks, advantages, strict=True):
        chosen = [value for value, kept in zip(values, mask, strict=True) if kept]
        if chosen:
            means.append(math.fsum(chosen) / len(chosen))
    return math.fsum(means) / len(means)


SETTINGS = {
    "mask by token, weights by sequence": {"rollout_rs": "token", "rollout_is": "geometric"},
    "mask by sequence, weights by token": {
        "rollout_rs": "geometric",
        "rollout_rs_threshold_lower": 0.75,
        "rollout_rs_threshold": 1.35,
        "rollout_is": "token",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_masks_and_weights_reach_the_loss(folder, name):
    algorithm = {"name": "gspo_token", **SETTINGS[name]}
    [(samples, metrics)] = run_distributed(one_step, 1, small(folder, algorithm=algorithm))
    kept = [sample.loss_mask.tolist() for sample in samples]
    weighted = [sample.advantages.tolist() for sample in samples]
    assert 0 < sum(map(sum, kept)) < sum(map(len, kept))
    assert any(abs(value) not in (0.0, 1.0) for values in weighted for value in values)
    assert metrics["loss"] == pytest.approx(-objective(kept, weighted), rel=1e-4, abs=1e-6)


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
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
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
    config = small(
        folder, algorithm={"name": "gspo", "old_log_probs": "rollout"}, training=training
    )
    [(samples, metrics)] = run_distributed(one_step, 1, config)
    [(scored, _)] = run_distributed(one_step, 1, small(folder))
    # update.mini_batches of seed 7, step 0, epoch 0.
    positions = np.random.default_rng([7, 0, 0]).permutation(16)[:4]
    first = TrainingBatch.of([scored[i] for i in positions])
    ratios: dict[str, RatioHistogram] = {}
    wanted = mismatch(first, first.responses["old_log_probs"], ratios)
    wanted |= quantiles_over_ranks(ratios, first)
    assert wanted["mismatch/abs_diff"] > 0.1
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-3)
    assert metrics["updates"] == 8 and "time/log_probs" not in metrics and "entropy" not in metrics
