"""The comparison is sensitive: every metric is non-zero, and no decision depends on rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_gspo.algorithms import Objective
from tests.algorithms.reference import Batch
from tests.equivalence.cases import OPTIMIZER, OTHERS, SCENARIOS, TRAINING
from tests.equivalence.defects import measure_defects
from tests.equivalence.layouts import FAMILIES, LANGUAGE_MODELS, MEASURED
from tests.equivalence.lora import ADAPTERS
from tests.equivalence.measure import DENSE_MODELS, MODELS, Models, case_for
from tests.equivalence.tolerances import TOLERANCES
from tests.equivalence.truth import expect, find_truth
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import gates_of, is_sigmoid, load_reference

# float32 moves a log-prob by about 3e-6 and a router's logit by less
MARGIN = 2e-5


SPARSE = ("deepseek_v32", "glm_dsa")
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("shared", *FAMILIES, *LANGUAGE_MODELS)
]


@pytest.fixture(scope="module", params=["moe", "dense", *SLOW])
def path(request, tmp_path_factory):
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / request.param, **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def truth(path):
    return find_truth(path)


def test_every_metric_takes_a_value_that_shows_a_wrong_share(truth):
    values: dict[str, list[float]] = {}
    for expected in truth.scenarios.values():
        for name, value in expected.metrics.items():
            values.setdefault(name, []).append(value)
    dull = [
        name
        for name, values_of_metric in values.items()
        if all(value in (0.0, 1.0) for value in values_of_metric)
    ]
    assert not dull
    assert len(values) >= 18, sorted(values)


def test_the_mini_batches_are_awkward(truth):
    for samples in [expected.samples for expected in truth.scenarios.values()] + truth.mini_batches:
        assert len({sample.length for sample in samples}) >= 5
        assert samples[0].response_length == 1 and not samples[1].loss_mask.any()
        assert any(0 < sample.loss_mask.sum() < len(sample.loss_mask) for sample in samples)


def test_every_parameter_has_a_gradient_that_an_error_can_be_measured_by(truth):
    """Where the terms of a gradient all but cancel, its rounding errors are as large as it is."""
    biased = any(name.endswith("e_score_correction_bias") for name in truth.training.update)
    for name, expected in truth.scenarios.items():
        tied = not any(key.endswith("lm_head.weight") for key in expected.gradients)
        # of twelve experts some are rarely chosen; a tied embedding's gradient, in the mean, is two
        least = 0.007 if biased or tied else 0.02
        norms = torch.stack([gradient.norm() for gradient in expected.gradients.values()])
        assert norms.min() > least * norms.square().mean().sqrt(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_has_a_gradient_that_an_error_can_be_measured_by(name, tmp_path):
    scenarios = case_for(name, MEASURED[name][0]).scenarios
    truth = Models(tmp_path)(name).read(scenarios)
    for scenario, expected in truth.scenarios.items():
        norms = torch.stack([gradient.norm() for gradient in expected.gradients.values()])
        # Of many small matrices some have few tokens.
        assert norms.min() > 0.009 * norms.median(), scenario


def decisions(objective: Objective, batch: Batch) -> Iterator[float]:
    """How far, in nats, every log-ratio is from every bound at which the loss changes its form."""
    limit = objective.max_log_ratio
    bounds = [-limit, limit, *(math.log(bound) for bound in objective.clip_range)]
    bounds += [math.log(objective.dual_clip)] if objective.dual_clip else []
    trained = batch.loss_mask > 0
    log_ratio = (batch.log_probs - batch.old_log_probs)[trained]
    ids = batch.segment_ids[trained]
    sequences = [log_ratio[ids == i].mean() for i in ids.unique()]
    for value in torch.stack(sequences) if objective.sequence_level else log_ratio:
        yield from (abs(float(value) - bound) for bound in bounds)
    for value in (batch.log_probs - batch.ref_log_probs)[trained]:
        yield abs(abs(float(value)) - limit)


def test_no_clip_hangs_on_rounding(truth):
    for name, expected in truth.scenarios.items():
        assert min(decisions(SCENARIOS[name].objective, expected.batch)) > MARGIN, name
    for step, batch in enumerate(truth.training.batches):
        assert min(decisions(TRAINING.objective, batch)) > MARGIN, step


def test_training_clips_gradients_and_changes_every_parameter(truth):
    assert all(step["grad_norm"] > OPTIMIZER.clip_grad for step in truth.training.steps)
    assert len({step["lr"] for step in truth.training.steps}) == 3
    still = [
        name for name, update in truth.training.update.items() if float(update.abs().max()) < 1e-4
    ]
    frozen = (name.endswith("e_score_correction_bias") or ".indexer." in name for name in still)
    assert all(frozen), still


def gap(values: torch.Tensor, k: int) -> float:
    """Smallest distance of the k-th and the next value of a row."""
    descending = values.sort(dim=-1, descending=True).values
    return (
        float((descending[:, k - 1] - descending[:, k]).min()) if k < values.shape[1] else math.inf
    )


@pytest.mark.parametrize(
    "name", ["moe", *(name for name in SLOW if name.values[0] not in DENSE_MODELS)]
)
def test_no_choice_of_experts_hangs_on_rounding(name, tmp_path):
    model = load_reference(save_tiny_model(tmp_path, **MODELS[name]))
    gaps: list[float] = []

    def look(module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        scores = output[0].detach()
        k = model.config.num_experts_per_tok
        if is_sigmoid(module):
            scores = scores.sigmoid() + (
                inputs[1] if len(inputs) > 1 else module.e_score_correction_bias
            )
            if getattr(module, "num_group", 1) > getattr(module, "topk_group", 1):
                groups = scores.view(len(scores), module.num_group, -1)
                best = groups.topk(2).values.sum(-1)
                gaps.append(gap(best, module.topk_group))
                out = best < best.topk(module.topk_group).values[:, -1:]
                scores = groups.masked_fill(out[..., None], -1e9).flatten(1)
        gaps.append(gap(scores, k))

    for gate in gates_of(model):
        gate.register_forward_hook(look)
    for scenario in (SCENARIOS | OTHERS).values():
        expect(model, scenario)
    assert gaps and min(gaps) > MARGIN


class Selections(TorchFunctionMode):
    """Notes how far the last of the ``count`` best is from the next, wherever so many are taken."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.gaps: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "topk" and args[1:2] == (self.count,):
            scores = args[0].flatten(0, -2)
            known = scores[torch.isfinite(scores).sum(-1) > self.count]
            if len(known):
                self.gaps.append(gap(known, self.count))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_no_selected_position_hangs_on_rounding(name, tmp_path):
    model = load_reference(save_tiny_model(tmp_path, **MODELS[name]))
    with Selections(model.config.index_topk) as selections:
        for scenario in SCENARIOS.values():
            expect(model, scenario)
    assert len(selections.gaps) > 50 and min(selections.gaps) > MARGIN


def test_small_defects_are_far_beyond_the_tolerance(path):
    errors = measure_defects(path)
    assert min(errors.values()) > 100 * TOLERANCES["gradient"], errors
