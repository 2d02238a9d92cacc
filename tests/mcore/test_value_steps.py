"""The value model in every kind of layout against Transformers in float64: values, loss,
metrics, gradients, a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.policy import Policy, TrainedParts, build_policy
from megatron_gspo.mcore.value_steps import compute_values, train_critic_mini_batch
from tests.equivalence.cases import make_samples
from tests.equivalence.first_update import check_first_critic_update
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import everywhere
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import checkpoint_gradients, load_reference, worst_error

LAYOUTS = {
    1: {"one process": parallel()},
    2: {
        "tensor": parallel(tensor=2),
        "pipeline": parallel(pipeline=2),
        "interleaved": parallel(pipeline=2, virtual_pipeline=2),
        "context": parallel(context=2),
        "expert": parallel(expert=2),
        "data": parallel(),
    },
    4: {"all": parallel(tensor=2, context=2, expert=2), "stages": parallel(pipeline=2, tensor=2)},
}
CUTS = {"packed": micro_batches_of(80), "one by one": micro_batches_of(80, micro_batch_size=1)}
CLIP = 0.1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a value head beside its output layer, whose values are about 1."""
    folder = Path(save_tiny_model(tmp_path_factory.mktemp("moe")))
    weights = load_file(folder / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = (
        torch.randn(1, hidden, generator=torch.Generator().manual_seed(1)) / hidden**0.5
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def with_targets(samples: list[Sample], values: list[np.ndarray]) -> list[Sample]:
    """Values and returns about the model's own, so that some tokens are clipped."""
    g = np.random.default_rng(5)
    for sample, value in zip(samples, values, strict=True):
        sample.values = (value + 0.2 * g.normal(size=value.shape)).astype(np.float32)
        sample.returns = (value + 0.5 * g.normal(size=value.shape)).astype(np.float32)
    return samples


def critic_of(path: str, layout: ParallelConfig) -> Policy:
    # Which keeps a part of the gradients on each rank.
    layout = replace(layout, use_distributed_optimizer=False)
    return build_policy(
        model_config(path, implementation="torch"),
        layout,
        groups_of(layout),
        parts=TrainedParts(value_head=True),
        total_steps=4,
        optimizer=adam(1e-2, clip_grad=0.0, adam_eps=2e-4),
    )


def export(critic: Policy, value: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    chunks = [unwrap(chunk) for chunk in critic.chunks]
    stream = export_weights(chunks, critic.family, critic.shape, critic.groups, value=value)
    return {name: tensor.detach().clone() for name, tensor in stream}


@dataclass(frozen=True)
class Update:
    """Of a critic: its values before a step, the step's metrics and gradients, its weights after."""

    values: list[np.ndarray]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def update_in_every_layout(
    rank: int, world_size: int, path: str, samples: list[Sample]
) -> dict[str, Update]:
    updates = {}
    for name, layout in LAYOUTS[world_size].items():
        for cut in CUTS if world_size != 2 else ("packed",):
            batching = CUTS[cut]
            critic = critic_of(path, layout)
            values = everywhere(
                compute_values(critic, TrainingBatch.of(samples), batching), samples, critic.groups
            )
            metrics = train_critic_mini_batch(
                critic, TrainingBatch.of(samples), batching, value_clip=CLIP
            )
            gradients = export(critic, lambda p: p.main_grad)
            critic.gather_weights()
            check_first_critic_update(critic, samples)
            weights = export(critic, torch.Tensor.detach)
            updates[f"{name}, {cut}"] = Update(values, metrics, gradients, weights)
    return updates


def reference_values(
    path: str, samples: list[Sample]
) -> tuple[torch.nn.Module, Tensor, list[Tensor]]:
    """The model, its head, and the values of each response, with gradient, in float64."""
    model = load_reference(path)
    head = load_file(Path(path) / "model.safetensors")["score.weight"].double().requires_grad_()
    values = []
    for sample in samples:
        hidden = model.model(
            input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False
        ).last_hidden_state[0]
        values.append((hidden[sample.prompt_length - 1 : -1] @ head.T)[:, 0])
    return model, head, values


def naive_loss(values: list[Tensor], samples: list[Sample]) -> tuple[Tensor, dict[str, float]]:
    """Token by token."""
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    mean = 0.0
    tokens = 0
    for value, sample in zip(values, samples, strict=True):
        for t in np.flatnonzero(sample.loss_mask):
            old = float(sample.values[t])
            wanted = float(sample.returns[t])
            plain = (value[t] - wanted) ** 2
            bounded = (torch.clamp(value[t], old - CLIP, old + CLIP) - wanted) ** 2
            clipped += bool(bounded > plain)
            total = total + torch.maximum(plain, bounded) / 2
            mean = mean + float(value[t])
            tokens = tokens + 1
    metrics = {"critic/clip_fraction": clipped / tokens, "critic/value": mean / tokens}
    return total / tokens, metrics | {"critic/loss": float(total) / tokens}


def test_values_loss_and_gradients_in_every_layout(path: str) -> None:
    samples = make_samples(count=8)
    model, head, values = reference_values(path, samples)
    with_targets(samples, [value.detach().numpy() for value in values])
    loss, metrics = naive_loss(values, samples)
    loss.backward()
    expected = {
        name: g for name, g in checkpoint_gradients(model).items() if name != "lm_head.weight"
    }
    expected["score.weight"] = head.grad
    assert 0.05 < metrics["critic/clip_fraction"] < 0.95
    norm = float(sum(g.square().sum() for g in expected.values())) ** 0.5
    metrics |= {"critic/grad_norm": norm, "critic/lr": 1e-2}
    weights_elsewhere: dict[str, Tensor] = {}
    for world in LAYOUTS:
        for updates in run_distributed(update_in_every_layout, world, path, samples):
            for where, update in updates.items():
                for value, wanted in zip(update.values, values, strict=True):
                    np.testing.assert_allclose(
                        value, wanted.detach().numpy(), atol=2e-5, err_msg=where
                    )
                for name, wanted in metrics.items():
                    assert update.metrics[name] == pytest.approx(wanted, rel=1e-4, abs=1e-5), (
                        f"{where}: {name}"
                    )
                name, error = worst_error(update.gradients, expected)
                assert error < 1e-4, f"{where}: {name} {error}"
                weights_elsewhere = weights_elsewhere or update.weights
                for name, weight in update.weights.items():
                    assert (weight - weights_elsewhere[name]).abs().max() < 1e-4, f"{where}: {name}"
