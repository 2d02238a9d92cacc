"""What each operation of a rank's step costs, by phase and call site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megatron_gspo.tools.rehearse.call_sites import Frames, call_site, frames_above
from megatron_gspo.tools.rehearse.known_values import tensors_in
from megatron_gspo.tools.rehearse.op_cost import OpCost, cost_of
from megatron_gspo.tools.rehearse.operation import Args, Kwargs, Operation, Result
from megatron_gspo.tools.rehearse.records import OpTotal

_PYTHON_BACKWARD = BackwardCFunction.apply.__code__
_Call = tuple[Operation, OpCost, int, tuple[tuple[torch.Size, torch.dtype], ...]]


class OpLog:
    """Counts equal calls. phase: the current one, set by the rehearsal.

    An operation of torch's own backward is counted at the call site of its forward operation: both
    have the sequence number of the autograd node. A backward that is written in Python has call
    sites of its own, unless its code is no call site.
    """

    def __init__(self) -> None:
        self.phase = "build"
        self._costs: dict[Any, _Call | None] = {}
        self._counts: Counter[tuple[str, bool, _Call, Frames]] = Counter()
        self._issued: Counter[str] = Counter()
        self._forward_frames: dict[int, Frames] = {}

    def record(
        self,
        func: Operation,
        args: Args,
        kwargs: Kwargs,
        out: Result,
        tensors: Sequence[Tensor],
        flops: int,
    ) -> None:
        """Count a call. tensors: the arguments'; flops: by `FlopLog`."""
        self._issued[self.phase] += 1
        shapes = tuple(
            [
                (tensor.shape, tensor.stride(), tensor.dtype)
                for tensor in (*tensors, *tensors_in((out,)))
            ]
        )
        key = func, flops, shapes, len(set(map(id, tensors)))
        if key not in self._costs:
            cost = cost_of(func, args, kwargs, out)
            inputs = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
            self._costs[key] = None if cost is None else (func, cost, flops, inputs)
        call = self._costs[key]
        newest_node = torch.autograd._get_sequence_nr() - 1  # it is made before its operation
        if call is None and newest_node in self._forward_frames:
            return
        is_backward = torch._C._current_graph_task_id() != -1
        frames = self._backward_frames() if is_backward else frames_above(3, 1)
        self._forward_frames.setdefault(newest_node, frames)
        if call is not None:
            self._counts[self.phase, is_backward, call, frames] += 1

    def _backward_frames(self) -> Frames:
        node = torch._C._current_autograd_node()
        in_python = isinstance(node, BackwardCFunction)
        frames = frames_above(4, 1, _PYTHON_BACKWARD) if in_python else ()
        if not frames and node is not None:
            frames = self._forward_frames.get(node._sequence_nr(), ())
        return frames or frames_above(4, 1)

    @property
    def issued(self) -> dict[str, int]:
        """Operations that the host issued, by phase; views are among them."""
        return dict(self._issued)

    @property
    def totals(self) -> tuple[OpTotal, ...]:
        return tuple(
            OpTotal(
                phase=phase,
                is_backward=is_backward,
                op=str(func),
                op_class=cost.op_class,
                where=" ".join(call_site(frames)),
                tensors=_described(inputs),
                count=count,
                launches=cost.launches,
                read=cost.read,
                written=cost.written,
                flops=flops,
            )
            for (phase, is_backward, (func, cost, flops, inputs), frames), count in (
                self._counts.items()
            )
        )


_MOST_TENSORS = 3  # of an operation, that are described


def _described(inputs: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    """Such as ``bfloat16 [16, 64], float32 [64]``."""
    words = [
        f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        for shape, dtype in inputs[:_MOST_TENSORS]
    ]
    rest = len(inputs) - len(words)
    return ", ".join(words) + (f" and {rest} more" if rest > 0 else "")
