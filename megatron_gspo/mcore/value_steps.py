"""The two passes of a value model over a rollout batch: values without a loss, and one
optimizer step (PPO).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_gspo.algorithms import finish_metrics, value_loss
from megatron_gspo.config import TrainingConfig
from megatron_gspo.data.micro_batch_plan import MicroBatchPlan
from megatron_gspo.data.packing import PackedBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.forward_step import (
    ForwardStep,
    LossFunction,
    hidden_states,
    undo_averaging,
    unwrap,
)
from megatron_gspo.mcore.micro_batch_inputs import VALUE_LOSS, InputReader, MicroBatchInputs
from megatron_gspo.mcore.micro_batches import values_of_replica
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import ProcessGroups
from megatron_gspo.mcore.train_step import (
    combined_shares,
    optimizer_step,
    pack_mini_batch,
    run_schedule,
    summed_metrics,
    zero_gradients,
)
from megatron_gspo.mcore.value_head import token_values


def compute_values(
    critic: Policy,
    batch: TrainingBatch,
    training: TrainingConfig,
    *,
    plan: MicroBatchPlan | None = None,
) -> np.ndarray:
    """The value before every response token: a column of the batch's responses, ``[T]`` float32.

    ``plan``: of the batch; None if every rank holds all its samples.
    """
    batches = pack_mini_batch(critic, batch, training, optional=(), routing=None, plan=plan)
    reader = InputReader(critic.groups, num_microbatches=len(batches.batches))

    def collect(
        inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor, non_loss_data: bool = True
    ) -> Tensor:
        return _values(inputs, model, hidden, critic.groups)

    critic.memory.restore_weights()
    with torch.no_grad():
        outputs = run_schedule(
            critic, _forward_step(reader, critic.groups, collect), batches, forward_only=True
        )
    return values_of_replica(outputs, batches.layouts, batch, critic.groups)


def train_critic_mini_batch(
    critic: Policy,
    batch: TrainingBatch,
    training: TrainingConfig,
    *,
    value_clip: float | None,
    plan: MicroBatchPlan | None = None,
) -> dict[str, float]:
    """One optimizer step on a global mini-batch whose samples have ``values`` and ``returns``;
    ``critic/*`` metrics, the same on every rank."""
    batches = pack_mini_batch(
        critic, batch, training, optional=("values", "returns"), routing=None, plan=plan
    )
    count = len(batches.batches)
    reader = InputReader(critic.groups, num_microbatches=count, loss=VALUE_LOSS)

    def loss_function(
        inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        packed = inputs.batch
        assert packed.values is not None and packed.returns is not None
        loss, metrics = value_loss(
            _values(inputs, model, hidden, critic.groups),
            old_values=packed.values,
            returns=packed.returns,
            loss_mask=packed.loss_mask,
            num_tokens=packed.num_tokens,
            value_clip=value_clip,
        )
        return undo_averaging(loss, count, critic.groups), {"metrics": metrics}

    zero_gradients(critic)
    outputs = run_schedule(
        critic, _forward_step(reader, critic.groups, loss_function), batches, forward_only=False
    )
    stepped = optimizer_step(critic)
    shares = combined_shares([output["metrics"] for output in outputs])
    [summed] = summed_metrics([shares], critic)
    return finish_metrics(summed) | {f"critic/{name}": value for name, value in stepped.items()}


def _forward_step(
    reader: InputReader,
    groups: ProcessGroups,
    collect: Callable[..., object],
) -> ForwardStep:
    def forward_step(
        batches: Iterator[PackedBatch], model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        inputs = reader.next_inputs(batches, unwrap(model))
        return hidden_states(model, inputs.batch, groups), partial(collect, inputs, model)

    return forward_step


def _values(
    inputs: MicroBatchInputs, model: MegatronModule, hidden: Tensor, groups: ProcessGroups
) -> Tensor:
    inner = unwrap(model)
    assert inputs.scored is not None, "the last stage"
    return token_values(
        inner.output_layer,
        hidden.squeeze(0),
        inputs.scored,
        groups,
        sequence_parallel=inner.config.sequence_parallel,
    )
