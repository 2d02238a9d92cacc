"""One source's stream on the ranks of its relays: every tensor to the bit, each byte broadcast
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_gspo.parallel.host_exchange import broadcast_bytes
from megatron_gspo.weight_transport import weight_relay
from megatron_gspo.weight_transport.weight_relay import relay_groups, relayed
from megatron_gspo.weight_transport.weight_source import Relay, WeightSource, numbered
from tests.support.distributed import collectives_so_far, run_distributed

SOURCES = numbered(
    [WeightSource(0), WeightSource(1, servers=(), relays=(Relay(3, ("a",)), Relay(2, ("b",))))]
)


def tensors(kind: str) -> dict[str, torch.Tensor]:
    """kind: "none"; "mixed": sizes of elements that do not divide each other's offsets, one tensor
    larger than a piece of 64 bytes, and an empty one."""
    if kind == "none":
        return {}
    drawn = torch.Generator().manual_seed(0)
    return {
        "bfloat16": torch.randn(3, 5, generator=drawn).bfloat16(),
        "float32": torch.randn(2, 3, generator=drawn),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "float64": torch.randn(4, generator=drawn, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "large": torch.randn(9, 9, generator=drawn).t(),
        "scalar": torch.tensor(3.0),
    }


def received(rank: int, world: int, kinds: list[str]) -> Any:
    """What each rank reads of each stream: (tensors, whether the rank's own stream was read to
    its end, broadcasts).
    """
    (group,) = relay_groups(SOURCES).values() if rank else (None,)
    assert list(relay_groups(SOURCES)) == ([1] if rank else [])
    streams = []
    for kind in kinds:
        ended = []

        def stream(
            kind: str = kind, ended: list[bool] = ended
        ) -> Iterator[tuple[str, torch.Tensor]]:
            if rank == 1:
                yield from tensors(kind).items()
            ended.append(True)

        if group is not None:
            before = collectives_so_far(group)
            got = {name: tensor.clone() for name, tensor in relayed(stream(), 1, group, piece=64)}
            streams.append((got, ended, collectives_so_far(group) - before))
    dist.barrier()
    return streams


def test_relays_get_every_tensor_to_the_bit() -> None:
    by_rank = run_distributed(received, 4, ["mixed", "none", "mixed"])
    assert by_rank[0] == []
    for streams in by_rank[1:]:
        for kind, (got, ended, _) in zip(("mixed", "none", "mixed"), streams, strict=True):
            expected = tensors(kind)
            assert list(got) == list(expected) and ended == [True]
            for name, tensor in expected.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
        assert [count for *_, count in streams] == [count for *_, count in by_rank[1]], (
            "all ranks of the group take part"
        )


@pytest.mark.parametrize("count", [1, 3])
def test_a_source_broadcasts_each_byte_once_whatever_the_number_of_relays(count: int) -> None:
    sent = run_distributed(bytes_sent, count + 1)[0]
    assert sent == sum(tensor.nbytes for tensor in tensors("mixed").values())


def bytes_sent(rank: int, world: int) -> int:
    """Of the data, without the headers, by the calls of `broadcast` on the source."""
    relays = tuple(Relay(other, (str(other),)) for other in range(1, world))
    (group,) = relay_groups(numbered([WeightSource(0, relays=relays)])).values()
    sent: list[int] = []
    headers: list[int] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    def header(*args: Any) -> np.ndarray:
        before = len(sent)
        message = broadcast_bytes(*args)
        headers.extend(sent[before:])
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        patch.setattr(weight_relay, "broadcast_bytes", header)
        for _ in relayed(tensors("mixed").items() if rank == 0 else (), 0, group, piece=64):
            pass
    return sum(sent) - sum(headers)
