"""Reference results of every scenario, by Transformers and naive loops in float64, computed
once and kept in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.data.sample import Sample
from tests.algorithms import reference as loops
from tests.equivalence.cases import (
    ALL,
    NOISE,
    OPTIMIZER,
    OPTIMIZER_STEPS,
    SCENARIOS,
    TRAINING,
    Scenario,
    make_samples,
    rollout_columns,
    teacher_columns,
    teacher_tables,
    with_branches,
    with_old_log_probs,
    with_supports,
)
from tests.support.transformers_reference import (
    Routers,
    Training,
    checkpoint_gradients,
    gates_of,
    give_random_routes,
    is_sigmoid,
    joined,
    load_reference,
    naive_metrics,
    naive_training,
    observe_routers,
    response_centering,
    response_distributions,
    response_divergence,
    score,
    without_gradient,
)

SEED = 27  # one with which every expert has a large enough gradient (see test_truth.py)
MEAN_ADVANTAGE = 0.3  # the loss of advantages around 0 is a small difference of large terms


@dataclass(frozen=True)
class Expected:
    """One scenario: its samples, and what comes of them.

    ``batch``: all response tokens with log-probs and entropy. ``columns``: further ones of the
    samples.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    batch: loops.Batch
    columns: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """What a model's launches are compared with. ``routers``: what they do with the samples of
    ``gspo`` under ``NOISE``. ``adapters``: the first values, and ``base_log_probs`` of ``gspo``'s
    samples without them.
    """

    scenarios: dict[str, Expected]
    mini_batches: list[list[Sample]]
    training: Training
    routers: Routers | None = None
    adapters: dict[str, Tensor] | None = None
    base_log_probs: Tensor | None = None


def scenario_samples(
    model: torch.nn.Module, scenario: Scenario, seed: int = SEED, scale: int = 1
) -> list[Sample]:
    """The samples of a scenario, with old log-probs a little off the model's."""
    samples = unscored_samples(model, scenario, seed, scale)
    with torch.no_grad():
        scored = score(model, samples, scenario.temperature)
    return with_old_log_probs(samples, values_of(scored), scenario.spread, seed + 1, outlier=3)


def unscored_samples(
    model: torch.nn.Module, scenario: Scenario, seed: int = SEED, scale: int = 1
) -> list[Sample]:
    """The samples of a scenario, without old log-probs."""
    samples = make_samples(
        seed,
        8,
        vocab_size=model.config.vocab_size,
        per_token=scenario.per_token,
        mean_advantage=MEAN_ADVANTAGE,
        scale=scale,
    )
    if scenario.branches:
        samples = with_branches(samples, seed)
    if scenario.truncated:
        samples = with_supports(samples, model.config.vocab_size, seed)
    if scenario.replay:
        give_random_routes(model, samples, seed)
    return samples


def values_of(scored: Sequence[tuple[Tensor, Tensor]]) -> list[np.ndarray]:
    """The log-probs of `score`, without their gradient."""
    return [log_probs.detach().numpy() for log_probs, _ in scored]


def expect(
    model: torch.nn.Module,
    scenario: Scenario,
    scale: int = 1,
    gradients_of: Callable[..., dict[str, Tensor]] = checkpoint_gradients,
) -> Expected:
    """The truth of one scenario; ``scale``: of `make_samples`."""
    samples = unscored_samples(model, scenario, scale=scale)
    model.zero_grad()
    # One pass gives the log-probs of the loss and those that the old ones are a little off.
    scored = score(model, samples, scenario.temperature)
    samples = with_old_log_probs(samples, values_of(scored), scenario.spread, SEED + 1, outlier=3)
    batch = joined(samples, scored)
    columns: dict[str, np.ndarray] = {}
    if scenario.all_ids:
        batch = replace(batch, divergence=whole_divergence_of(model, samples, scenario))
    elif scenario.distillation is not None:
        columns |= teacher_columns(samples, model.config.vocab_size)
        batch = replace(batch, divergence=divergence_of(model, samples, scenario, columns))
    if scenario.score_centering is not None:
        columns |= rollout_columns(samples, model.config.vocab_size)
        advantages = torch.from_numpy(columns["centering_advantages"]).double()
        of_position = centering_of(model, samples, scenario, columns)
        batch = replace(batch, centering=of_position, centering_advantages=advantages)
    loops.naive_loss(scenario.objective, batch, batch.log_probs, batch.entropy).backward()
    gradients = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    return Expected(
        samples,
        naive_metrics(scenario.objective, batch),
        gradients,
        without_gradient(batch),
        columns,
    )


def divergence_of(
    model: torch.nn.Module,
    samples: list[Sample],
    scenario: Scenario,
    columns: dict[str, np.ndarray],
) -> Tensor:
    """Of all response tokens, end to end, with its gradient."""
    assert scenario.distillation is not None
    return torch.cat(
        [
            response_divergence(
                model, sample, scenario.temperature, scenario.distillation, ids, log_probs
            )
            for sample, ids, log_probs in _top_ids(samples, columns, "teacher")
        ]
    )


def whole_divergence_of(
    model: torch.nn.Module, samples: list[Sample], scenario: Scenario
) -> Tensor:
    """Of all response tokens, end to end, over the vocabulary, with its gradient."""
    assert scenario.distillation is not None
    hidden, weight = (table.double() for table in teacher_tables(model.config.vocab_size))
    share = scenario.distillation.forward_weight
    values = []
    for sample in samples:
        log_p = response_distributions(model, sample, scenario.temperature)
        logits = hidden[torch.from_numpy(sample.response_ids)] @ weight.T
        log_t = (logits / scenario.temperature).log_softmax(-1)
        reverse = (log_p.exp() * (log_p - log_t)).sum(-1)
        forward = (log_t.exp() * (log_t - log_p)).sum(-1)
        values.append(scenario.distillation.coef * ((1 - share) * reverse + share * forward))
    return torch.cat(values)


def centering_of(
    model: torch.nn.Module,
    samples: list[Sample],
    scenario: Scenario,
    columns: dict[str, np.ndarray],
) -> Tensor:
    """Of all response tokens, end to end, with its gradient."""
    assert scenario.score_centering is not None
    return torch.cat(
        [
            response_centering(
                model, sample, scenario.temperature, scenario.score_centering, ids, log_probs
            )
            for sample, ids, log_probs in _top_ids(samples, columns, "rollout")
        ]
    )


def _top_ids(
    samples: list[Sample], columns: dict[str, np.ndarray], of: str
) -> Iterator[tuple[Sample, np.ndarray, np.ndarray]]:
    """Each sample with its ids and their log-probs."""
    ends = np.cumsum([sample.response_length for sample in samples])[:-1]
    ids = np.split(columns[f"{of}_top_ids"], ends)
    log_probs = np.split(columns[f"{of}_top_log_probs"], ends)
    return zip(samples, ids, log_probs, strict=True)


def find_truth(path: str, names: Sequence[str] = tuple(SCENARIOS)) -> Truth:
    """Everything that is expected of the model at ``path``."""
    model = load_reference(path)
    scenarios = {name: expect(model, ALL[name]) for name in names}
    return replace(find_rest(model, scenarios["gspo"].samples), scenarios=scenarios)


def find_rest(model: torch.nn.Module, samples: Sequence[Sample]) -> Truth:
    """All but the scenarios. The model is trained in place. samples: of ``gspo``."""
    gates = gates_of(model)
    noise = None if any(map(is_sigmoid, gates)) else NOISE
    routers = observe_routers(model, samples, noise) if gates else None
    mini_batches = [scenario_samples(model, TRAINING, seed) for seed in (10, 11, 12)]
    model.zero_grad()
    training = naive_training(model, TRAINING.objective, mini_batches, OPTIMIZER, OPTIMIZER_STEPS)
    return Truth({}, mini_batches, training, routers)


@dataclass(frozen=True)
class ModelFiles:
    """A model's directory and the folder of its truth: a file a scenario and one of the rest."""

    path: str
    folder: Path

    @property
    def _rest(self) -> Path:
        return self.folder / "rest.pt"

    def _scenario(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def make(self, names: Iterable[str]) -> None:
        """Compute these scenarios and the rest, unless they are there already."""
        absent = [name for name in names if not self._scenario(name).exists()]
        if absent:
            model = load_reference(self.path)
            self.save({name: expect(model, ALL[name]) for name in absent})
        if not self._rest.exists():
            model = load_reference(self.path)
            self.save({}, find_rest(model, scenario_samples(model, ALL["gspo"])))

    def save(self, scenarios: dict[str, Expected], rest: Truth | None = None) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, expected in scenarios.items():
            torch.save(expected, self._scenario(name))
        if rest is not None:
            torch.save(rest, self._rest)

    def read(self, names: Iterable[str]) -> Truth:
        """The rest and these scenarios."""
        rest = torch.load(self._rest, weights_only=False)
        scenarios = {
            name: torch.load(self._scenario(name), weights_only=False) for name in sorted(names)
        }
        return replace(rest, scenarios=scenarios)
