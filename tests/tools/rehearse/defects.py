"""Defects, put into the code of a training step while it is rehearsed.

``with defect(SKIPPED):`` replaces one function of the project or of Megatron. Each entry is the
name of the function and what makes the defective one of it.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Defect = tuple[str, Callable[[Any], Any]]


@contextlib.contextmanager
def defect(*entries: Defect) -> Iterator[None]:
    """Within the context the functions of all entries are defective."""
    with contextlib.ExitStack() as stack:
        for target, make in entries:
            stack.enter_context(mock.patch(target, make(pkgutil.resolve_name(target))))
        yield


# Of each rank alone


def _bias_on_the_host(original: Any) -> Any:
    def gating(self: Any, input: Tensor) -> Tensor:
        return original(self, input) + torch.zeros(self.weight.shape[0])

    return gating


def _check_of_each_layer(original: Any) -> Any:
    def gating(self: Any, input: Tensor) -> Tensor:
        logits = original(self, input)
        if logits.max().item() > 1e4:
            raise ValueError("the router diverged")
        return logits

    return gating


def _rows_of_a_mask(original: Any) -> Any:
    def gating(self: Any, input: Tensor) -> Tensor:
        logits = original(self, input)
        is_real = torch.arange(logits.shape[0], device=logits.device) > 0
        return logits + logits[is_real].mean() + logits.masked_select(is_real[:, None, None]).mean()

    return gating


def _unpinned_inputs(original: Any) -> Any:
    def copy_to_device(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        narrow = {
            name: value.int() if value.dtype == torch.int64 else value
            for name, value in tensors.items()
        }
        return {name: value.to(device, non_blocking=True) for name, value in narrow.items()}

    return copy_to_device


def _metrics_of_the_host(original: Any) -> Any:
    def reduce_metrics(metrics: dict[str, Tensor], group: Any) -> Any:
        return original({name: value.cpu() for name, value in metrics.items()}, group)

    return reduce_metrics


_GATING = "megatron.core.transformer.moe.router.Router.gating"
BIAS_ON_THE_HOST = (_GATING, _bias_on_the_host)
CHECK_OF_EACH_LAYER = (_GATING, _check_of_each_layer)
ROWS_OF_A_MASK = (_GATING, _rows_of_a_mask)
UNPINNED_INPUTS = ("megatron_gspo.mcore.micro_batch_inputs.copy_to_device", _unpinned_inputs)
METRICS_OF_THE_HOST = ("megatron_gspo.mcore.train_step.reduce_metrics", _metrics_of_the_host)


# Of one rank among others


def _skipped(original: Any) -> Any:
    return lambda model, config, tp_group=None: None


def _swapped(original: Any) -> Any:
    def token_dispatch(self: Any, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        from megatron.core.tensor_parallel import all_to_all

        counts = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        self.tokens_per_expert = counts
        probs = all_to_all(self.ep_group, probs, self.output_splits, self.input_splits)
        return all_to_all(self.ep_group, tokens, self.output_splits, self.input_splits), probs

    return token_dispatch


def _no_receive(original: Any) -> Any:
    def recv_forward(self: Any, tensor_shapes: Any, is_first_stage: bool) -> Tensor:
        [shape] = tensor_shapes if isinstance(tensor_shapes, list) else [tensor_shapes]
        made = torch.empty(
            shape, dtype=self.config.pipeline_dtype, device="cuda", requires_grad=True
        )
        return [made] if isinstance(tensor_shapes, list) else made  # type: ignore[return-value]

    return recv_forward


SKIPPED = (
    "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
    _skipped,
)
SWAPPED = (
    "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.token_dispatch",
    _swapped,
)
NO_RECEIVE = (
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator.recv_forward",
    _no_receive,
)
