"""Which values of weights and optimizer this rank owns, as regions of the checkpoint's tensors.

With the distributed optimizer a rank owns a range of each flattened parameter: of the main weights
and the optimizer's state, and by the same range of the model's weights. What all data-parallel ranks
replicate is divided among them evenly. A range is a few boxes of the parameter's tensor
(`tensor_boxes`), so that it is stored under the tensor's own key and sizes, without gathering, and
read in any parallel layout.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from torch import Tensor

from megatron_gspo.mcore.checkpoint.pieces import Piece, sharded_tensors
from megatron_gspo.mcore.checkpoint.tensor_boxes import Box, boxes_of_range
from megatron_gspo.mcore.forward_step import unwrap
from megatron_gspo.mcore.optimizer_state import (
    has_stepped,
    set_state_numbers,
    state_numbers,
    state_tensors,
)
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.policy_tensors import torch_optimizers, wrapped_optimizers

_MAX_BYTES = 256 << 20  # of a piece


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Bytes of the values, each once."""
    return sum({piece.memory: piece.values.nbytes for piece in pieces}.values())


@dataclass(frozen=True)
class _State:
    """The elements ``start`` to ``stop`` of a flattened parameter: main weights and state by name,
    [stop - start].
    """

    start: int
    stop: int
    tensors: Mapping[str, Tensor]


def pieces_to_write(policy: Policy) -> list[Piece]:
    """What this rank owns of the policy and its critic; all ranks together own each element
    once.
    """
    return _of_all_models(policy, _pieces_to_write)


def _pieces_to_write(policy: Policy) -> list[Piece]:
    states, shared = _optimizer_states(policy)
    pieces: list[Piece] = []
    for parameter, sharded in _sharded_tensors(policy):
        replica_id = sharded.replica_id
        *replica, copy = replica_id if isinstance(replica_id, tuple) else (replica_id, 0)
        if any(replica):
            continue
        state = _state_of(parameter, states, shared)
        start = state.start
        stop = state.stop
        if id(parameter) not in shared:
            copies = _copies(parameter)
            start = parameter.numel() * copy // copies
            stop = parameter.numel() * (copy + 1) // copies
        pieces += _pieces(parameter, sharded, state, start, stop)
    return pieces


def pieces_to_read(policy: Policy) -> list[Piece]:
    """What this rank holds of the policy and its critic, without the weights that
    `Policy.gather_weights` brings from their owners."""
    return _of_all_models(policy, _pieces_to_read)


def _of_all_models(policy: Policy, pieces_of: Callable[[Policy], list[Piece]]) -> list[Piece]:
    return [
        replace(piece, key=prefix + piece.key)
        for prefix, model in policy.trained.items()
        for piece in pieces_of(model)
    ]


def _pieces_to_read(policy: Policy) -> list[Piece]:
    states, shared = _optimizer_states(policy)
    pieces: list[Piece] = []
    for parameter, sharded in _sharded_tensors(policy):
        state = _state_of(parameter, states, shared)
        pieces += _pieces(parameter, sharded, state, state.start, state.stop)
    return pieces


def stored_objects(policy: Policy) -> dict[str, bytes]:
    """Key -> what Megatron stores of a layer besides tensors, as its ``torch_dist`` format does;
    nothing of a frozen base."""
    objects = {}
    for prefix, model in policy.trained.items():
        for chunk in model.chunks if model.trained_lora is None else ():
            for value in unwrap(chunk).sharded_state_dict().values():
                if isinstance(value, ShardedObject) and is_main_replica(value.replica_id):
                    stream = io.BytesIO()
                    torch.save([value.data], stream)
                    objects[prefix + value.unique_key] = stream.getvalue()
    return objects


@torch.no_grad()
def make_state(policy: Policy) -> None:
    """Let every optimizer make its state, as its first step does, unless it has stepped.

    Weights and state have no meaning then: they are read afterwards.
    """
    for wrapped in wrapped_optimizers(policy.optimizer):
        assert wrapped.optimizer is not None
        if not has_stepped(wrapped.optimizer):
            wrapped.prepare_grads()
            wrapped.optimizer.step()
            wrapped.zero_grad()


def optimizer_numbers(policy: Policy) -> dict[str, float]:
    """The numbers in the optimizer's state, as Adam's step count, by name."""
    return state_numbers(torch_optimizers(policy.optimizer))


def set_optimizer_numbers(policy: Policy, numbers: Mapping[str, float]) -> None:
    """See `optimizer_numbers`."""
    set_state_numbers(torch_optimizers(policy.optimizer), numbers)


def _sharded_tensors(policy: Policy) -> Iterator[tuple[Tensor, ShardedTensor]]:
    """Each parameter (or buffer) with Megatron's description of it: two of a gated ``linear_fc1``.
    With adapters only theirs: the rest is the base, which stays as it is."""
    for chunk in policy.chunks:
        for value, sharded in sharded_tensors(unwrap(chunk)):
            if policy.trained_lora is None or getattr(value, "requires_grad", False):
                yield value, sharded


def _pieces(
    parameter: Tensor, part: ShardedTensor, state: _State, start: int, stop: int
) -> Iterator[Piece]:
    """The elements ``start`` to ``stop`` of ``parameter`` that are in ``part``, of the weights
    and of the state.
    """
    assert part.data.is_contiguous(), f"{part.key} is not contiguous"
    first = part.data.storage_offset() - parameter.storage_offset()
    start = max(start, first)
    stop = min(stop, first + part.data.numel())
    sources = {part.key: (parameter.detach().view(-1), 0)}
    sources |= {
        f"optimizer.state.{name}.{part.key}": (values, state.start)
        for name, values in state.tensors.items()
    }
    for key, (values, base) in sources.items():
        limit = _MAX_BYTES // values.element_size()
        for begin in range(start, stop, limit):
            at = begin - base
            for box in boxes_of_range(
                part.local_shape, begin - first, min(begin + limit, stop) - first
            ):
                there = Box(
                    (0,) * part.prepend_axis_num + box.offsets,
                    (1,) * part.prepend_axis_num + box.sizes,
                )
                yield Piece(
                    key,
                    tuple(part.global_shape),
                    there.moved(part.global_offset),
                    values[at : at + box.numel],
                    part.allow_shape_mismatch,
                )
                at += box.numel


def _optimizer_states(policy: Policy) -> tuple[dict[int, _State], set[int]]:
    """Parameter id -> its state on this rank; and the ids of the parameters whose state the
    ranks divide.
    """
    states: dict[int, _State] = {}
    shared: set[int] = set()
    for wrapped in wrapped_optimizers(policy.optimizer):
        assert wrapped.optimizer is not None
        if isinstance(wrapped, DistributedOptimizer):
            shared |= {id(parameter) for buffer in wrapped.buffers for parameter in buffer.params}
            for parameter, held in _ranges(wrapped):
                tensors = wrapped._get_main_param_and_optimizer_states(parameter)
                states[id(parameter)] = _State(held.start, held.end, _flat(tensors))
        else:
            groups = wrapped.optimizer.param_groups
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            for parameter in _trained(policy):
                main = getattr(parameter, "main_param", parameter)
                if id(main) in stepped:
                    tensors = {"param": main, **wrapped.optimizer.state.get(main, {})}
                    states[id(parameter)] = _State(0, parameter.numel(), _flat(tensors))
    return states, shared


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, Range]]:
    """This rank's parameters and its range of each, in elements of the flattened parameter."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.detach().view(-1) for name, values in state_tensors(tensors).items()}


def _state_of(parameter: Tensor, states: Mapping[int, _State], shared: set[int]) -> _State:
    whole = _State(0, 0 if id(parameter) in shared else parameter.numel(), {})
    return states.get(id(parameter), whole)


def _copies(parameter: Tensor) -> int:
    """Data-parallel ranks that hold the same values."""
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())


def _trained(policy: Policy) -> Iterator[Tensor]:
    for chunk in policy.chunks:
        yield from (parameter for parameter in chunk.parameters() if parameter.requires_grad)
