"""The ratios of a step's updates while no weight changes, with a model whose results depend on the
shape of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.config import Config
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.critic import run_critic_steps, with_values
from megatron_gspo.loop.log_probs import with_log_probs
from megatron_gspo.loop.loss_masking import mask_samples
from megatron_gspo.loop.optimizer_steps import run_optimizer_steps
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
from megatron_gspo.loop.routing import RoutingReplay
from megatron_gspo.loop.sample_flops import sample_flops
from megatron_gspo.loop.step_plan import StepPlan, plan_step
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.parallel.scored_rows import ScoredRows
from megatron_gspo.rollout.sample_exchange import move_samples
from tests.support.training_runs import base_config


def check_first_update(policy: Policy, samples: list[Sample], *, replay: str) -> None:
    """Every ratio is exactly 1 where the optimizer does nothing."""
    metrics = metrics_without_a_change(policy, samples, replay=replay)
    assert metrics["log_ratio/first_update"] == 0.0
    assert metrics["ratio_token/min"] == metrics["ratio_token/max"] == 1.0


def metrics_without_a_change(
    policy: Policy, samples: list[Sample], *, replay: str
) -> dict[str, float]:
    """Of the updates of a step in which no weight changes: mini-batches of several micro-batches
    each, and a response that is masked after its log-probs are known.
    """
    config = _config(algorithm={"name": "grpo"}, routing={"replay": replay})
    samples = [replace(sample, reward=0.0) for sample in samples]
    samples[5].reward = float("nan")
    plan, batch = _planned(policy, samples, config)
    routing = RoutingReplay(config.routing, policy.routes, has_ratio=True)
    with shape_dependent(policy):
        batch, _ = with_log_probs(batch, policy, None, config, plan, routing, Timers(), {})
        batch, masked = mask_samples(batch, step=0, truncated=False)
        ratios: dict[str, RatioHistogram] = {}
        update = run_optimizer_steps(policy, batch, config, 0, plan, routing, Timers(), ratios)
    assert (masked["masked/unscored"], update.metrics["updates"]) == (1, 2)
    return update.metrics | quantiles_over_ranks(ratios, batch)


def check_first_critic_update(critic: Policy, samples: list[Sample]) -> None:
    """Values are exactly those of the passes before, where the optimizer does nothing: a value
    model that is trained on them has no loss.
    """
    config = _config(algorithm={"name": "ppo"})
    plan, batch = _planned(critic, [replace(sample, reward=0.0) for sample in samples], config)
    with shape_dependent(critic):
        batch = with_values(batch, critic, config, plan, Timers())
        batch = batch.with_column("returns", batch.responses["values"])
        metrics = run_critic_steps(critic, batch, config, 0, plan, Timers())
    assert metrics["critic/loss"] == 0.0 and metrics["critic/value"] != 0.0


def _config(**sections: dict[str, Any]) -> Config:
    training = {"global_batch_size": 4, "max_tokens_per_micro_batch": 32}
    return Config.from_dict(base_config("model", "run", training=training, **sections))


def _planned(
    policy: Policy, samples: list[Sample], config: Config
) -> tuple[StepPlan, TrainingBatch]:
    """The plan of a step, and its samples on their replicas."""
    batch = SampleBatch.of(samples)
    groups = policy.groups
    rules = packing_rules(config.training, policy.config, groups)
    costs = sample_flops(batch, policy.shape).costs
    plan = plan_step(batch, None, config, rules, 0, costs=costs)
    return plan, move_samples(batch, plan.replica, groups)


@contextmanager
def shape_dependent(policy: Policy) -> Iterator[None]:
    """Within the context the outputs of layers and of the head depend on the number of their rows
    and on the place of each, and the optimizer does nothing.
    """
    layers = [layer for chunk in policy.chunks for layer in unwrap(chunk).decoder.layers]

    def perturb_output(layer: torch.nn.Module, inputs: Any, output: Any) -> Any:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = perturbed(hidden)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    hooks = [layer.register_forward_hook(perturb_output) for layer in layers]
    select_own = ScoredRows.select_own
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy.optimizer, "step", lambda: (True, 0.0, None))
        patched.setattr(
            ScoredRows, "select_own", lambda rows, hidden: perturbed(select_own(rows, hidden))
        )
        yield
    for hook in hooks:
        hook.remove()


def perturbed(rows: Tensor) -> Tensor:
    """Rows [n, ...] scaled by about 1, differently for each n and place."""
    count = len(rows)
    scale = 1 + 0.01 * torch.sin(count + torch.arange(count, dtype=rows.dtype))
    return rows * scale.view(-1, *[1] * (rows.dim() - 1))
