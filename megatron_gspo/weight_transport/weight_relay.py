"""One source's tensors from its rank to ranks of other nodes, which hand them to the servers
beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gspo.parallel.host_exchange import broadcast_bytes, group_device
from megatron_gspo.parallel.typed_messages import decode, encode
from megatron_gspo.weight_transport.buckets import Bucket, Entry, buckets
from megatron_gspo.weight_transport.weight_source import WeightSource

PIECE = 48 * 2**20  # bytes of a broadcast; a larger tensor goes alone


def relay_groups(sources: Sequence[WeightSource | None]) -> dict[int, ProcessGroup]:
    """A process group of each source that has relays, by the source's number: its rank and those of
    its relays.

    A collective of all ranks.
    """
    made = {
        source.number: dist.new_group([source.rank, *(relay.rank for relay in source.relays)])
        for source in sources
        if source is not None and source.relays
    }
    # Those of this rank.
    return {number: group for number, group in made.items() if isinstance(group, ProcessGroup)}


def relayed(
    stream: Iterable[tuple[str, Tensor]], rank: int, group: ProcessGroup, piece: int = PIECE
) -> Iterator[tuple[str, Tensor]]:
    """The source's stream on every rank of the group; each tensor is broadcast once, whatever the
    number of ranks.

    Tensors are valid until the next is asked for. A collective of the group; memory: `piece`, or
    the largest tensor if that is larger.

    Args:
        stream: of the source, which the other ranks read too, since producing it may be collective.
        rank: the source's rank in the world.
        piece: bytes of a broadcast.
    """
    device = group_device(group)
    if dist.get_rank() != rank:
        for _ in stream:
            pass
        while (bucket := _receive(rank, group, device)) is not None:
            yield from bucket.tensors()
        return
    for bucket in buckets(stream, piece, device=device):
        broadcast_bytes(encode(bucket.entries), group, dist.get_group_rank(group, rank))
        dist.broadcast(bucket.data, src=rank, group=group)
        yield from bucket.tensors()
    broadcast_bytes(encode(()), group, dist.get_group_rank(group, rank))


def _receive(rank: int, group: ProcessGroup, device: torch.device) -> Bucket | None:
    """The next bucket; None: there is none."""
    message = broadcast_bytes(None, group, dist.get_group_rank(group, rank)).tobytes()
    entries: tuple[Entry, ...] = decode(message, tuple[Entry, ...])
    if not entries:
        return None
    data = torch.empty(entries[-1].stop, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=rank, group=group)
    return Bucket(entries, data)
