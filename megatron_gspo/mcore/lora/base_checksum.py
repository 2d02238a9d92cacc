"""A checksum of a model's frozen weights that is the same in every parallel layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gspo.mcore.hf_weights import MappedParameter, map_parameters
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.models import Family, ModelShape, Shard

_ELEMENTS = 1 << 22  # at once, as 64-bit integers
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def base_checksum(
    chunks: Sequence[GPTModel], family: Family, shape: ModelShape, groups: ProcessGroups
) -> str:
    """16 hexadecimal digits of names, positions and bits of all weights of the (unwrapped) chunks;
    adapters don't count.

    Each element's bits times a number for its tensor, row and column, summed modulo 2 ** 64, each
    element once. A collective of all ranks.
    """
    total = torch.zeros((), dtype=torch.int64, device=compute_device())
    for chunk in chunks:
        for mapped in map_parameters(chunk, family, shape, groups):
            if _counts(mapped, shape, groups):
                for factor, shard, positions in _shards(mapped, shape, groups):
                    total += factor * _sum(shard, positions)
    dist.all_reduce(total)
    return f"{int(total) & (2**64 - 1):016x}"


def _counts(mapped: MappedParameter, shape: ModelShape, groups: ProcessGroups) -> bool:
    """Whether this rank is the first of those that hold these values."""
    if mapped.rule.is_expert:
        replica = parallel_state.get_expert_data_parallel_rank()
        tensor = groups.expert_tp.rank()
    else:
        replica = groups.dp_cp.rank()
        tensor = groups.tp.rank()
    is_copy = shape.tied_embeddings and groups.pp.rank() > 0 and mapped.rule.is_vocabulary
    return replica == 0 and not is_copy and (tensor == 0 or mapped.rule.shard is not Shard.NONE)


def _shards(
    mapped: MappedParameter, shape: ModelShape, groups: ProcessGroups
) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """For each Hugging Face tensor its factor, this rank's shard [rows, columns], and the positions
    of these in the whole tensor. The padding of a vocabulary is left out."""
    local = mapped.local_slice(groups)
    rule = mapped.rule
    for name, tensor in local.split(mapped.parameter.detach(), shape).items():
        shard = tensor.reshape(len(tensor), -1)
        positions = [torch.arange(size, device=shard.device) for size in shard.shape]
        cut = rule.shard.value
        if cut is not None:
            blocks = rule.blocks_of(name, shard.shape[cut] * local.ranks, shape)
            positions[cut] = _positions(blocks, local.rank, local.ranks).to(shard.device)
        if rule.is_vocabulary:
            kept = int((positions[0] < shape.vocab_size).sum())
            shard = shard[:kept]
            positions[0] = positions[0][:kept]
        digest = hashlib.sha256(name.encode()).digest()
        yield int.from_bytes(digest[:7], "little") | 1, shard, positions


def _positions(blocks: Sequence[int], rank: int, ranks: int) -> Tensor:
    """The positions that a rank holds where each block of a dimension is cut over the ranks."""
    positions = []
    first = 0
    for size in blocks:
        each = size // ranks
        positions.append(torch.arange(first + rank * each, first + (rank + 1) * each))
        first += size
    return torch.cat(positions)


def _sum(shard: Tensor, positions: Sequence[Tensor]) -> Tensor:
    """The sum of bits * number of row * number of column, int64."""
    row_numbers = _mixed(positions[0])
    column_numbers = _mixed(positions[1] + (1 << 40))
    total = row_numbers.new_zeros(())
    step = max(_ELEMENTS // max(shard.shape[1], 1), 1)
    integers = _INTEGERS[shard.element_size()]
    for first in range(0, len(shard), step):
        bits = shard[first : first + step].contiguous().view(integers).to(torch.int64)
        total += ((bits * column_numbers).sum(1) * row_numbers[first : first + step]).sum()
    return total


def _mixed(numbers: Tensor) -> Tensor:
    """Odd numbers without a pattern, modulo 2 ** 64."""
    mixed = numbers * 0x5851F42D4C957F2D + 0x14057B7EF767814F
    return ((mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D) | 1
