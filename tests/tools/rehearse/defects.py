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


_GATING = "megatron_gspo.mcore.router.ExactRouter.gating"
BIAS_ON_THE_HOST = (_GATING, _bias_on_the_host)
CHECK_OF_EACH_LAYER = (_GATING, _check_of_each_layer)


# Of one rank among others


def _skipped(original: Any) -> Any:
    return lambda model, config, tp_group=None: None


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
NO_RECEIVE = (
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator.recv_forward",
    _no_receive,
)
