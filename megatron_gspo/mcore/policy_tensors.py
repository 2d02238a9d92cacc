"""The tensors that a policy holds between steps: weights, gradients and optimizer state.

``chunks``: of the model, wrapped by DistributedDataParallel or not; ``optimizer``: Megatron's, or
None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_gspo.mcore.protocols import MegatronOptimizer, WrappedOptimizer


def weights(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """All parameters; several may share a storage."""
    for chunk in chunks:
        yield from chunk.parameters()


def gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """The gradient buffers; none without DistributedDataParallel."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield from (buffer.grad_data, *getattr(buffer, "extra_main_grads", ()))


def wrapped_optimizers(optimizer: MegatronOptimizer | None) -> list[WrappedOptimizer]:
    """The optimizers that Megatron chains, without those of which this rank has no parameter."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [wrapped for wrapped in chained if getattr(wrapped, "optimizer", None) is not None]


def torch_optimizers(optimizer: MegatronOptimizer | None) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers within Megatron's."""
    for wrapped in wrapped_optimizers(optimizer):
        assert wrapped.optimizer is not None
        yield wrapped.optimizer


def optimizer_states(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None
) -> Iterator[Tensor]:
    """Main parameters and moments on the parameters' device; without those that are views of
    the parameters.
    """
    owned = {parameter.untyped_storage()._cdata for parameter in weights(chunks)}
    device = next(weights(chunks)).device
    for inner in torch_optimizers(optimizer):
        tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [
            value
            for state in inner.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        for tensor in tensors:
            if tensor.device == device and tensor.untyped_storage()._cdata not in owned:
                yield tensor
