"""Packing a stream into buckets: what is in them, how large they get, and what they cost."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_gspo.weight_transport.buckets import buckets, describe
from megatron_gspo.weight_transport.sglang_payload import shared_buffer

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def unpacked(
    stream: list[tuple[str, Tensor]], size: int, **more: object
) -> list[list[tuple[str, Tensor]]]:
    """The tensors of each bucket, copied while the bucket is valid."""
    return [
        [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        for bucket in buckets(stream, size, **more)
    ]


def test_worked_case() -> None:
    # 8 + 8 bytes fill a bucket of 16; 4 + 2 leave 10, too few for 12; 20 is larger than any bucket
    stream = [
        ("a", torch.arange(2.0)),
        ("b", torch.arange(2.0)),
        ("c", torch.arange(1.0)),
        ("d", torch.ones(1).bfloat16()),
        ("e", torch.arange(3.0)),
        ("f", torch.arange(5.0)),
        ("g", torch.arange(1.0)),
    ]
    packed = [
        (describe(b), b.nbytes, [(e.start, e.stop) for e in b.entries]) for b in buckets(stream, 16)
    ]
    assert packed == [
        ("a and 1 more", 16, [(0, 8), (8, 16)]),
        ("c and 1 more", 6, [(0, 4), (4, 6)]),
        ("e", 12, [(0, 12)]),
        ("f", 20, [(0, 20)]),
        ("g", 4, [(0, 4)]),
    ]


def test_a_tensor_begins_at_a_multiple_of_its_elements() -> None:
    # SGLang views its bytes as elements, and refuses a bucket with gaps
    stream = [
        ("a", torch.ones(1).bfloat16()),
        ("b", torch.ones(1)),
        ("c", torch.ones(1).bfloat16()),
    ]
    assert [[e.name for e in b.entries] for b in buckets(stream, 100)] == [["a"], ["b", "c"]]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        max_size=12,
    ),
    st.integers(1, 300),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_or_larger_than_allowed(parts: list, size: int, shared: bool) -> None:
    stream = []
    for number, (dtype, shape, transposed) in enumerate(parts):
        tensor = torch.randint(0, 100, shape).to(dtype)
        stream.append((f"t{number}", tensor.t() if transposed and tensor.dim() == 2 else tensor))
    bucketed = unpacked(stream, size, allocate=shared_buffer if shared else None)
    together = [pair for bucket in bucketed for pair in bucket]
    assert [name for name, _ in together] == [name for name, _ in stream]
    for (_, ours), (_, given_) in zip(together, stream, strict=True):
        assert ours.dtype == given_.dtype
        assert ours.shape == given_.shape
        assert torch.equal(ours, given_)
    for bucket in bucketed:
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        assert nbytes <= size or len([tensor for _, tensor in bucket if tensor.numel()]) == 1


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ValueError, match="^b comes twice"):
        list(buckets([("a", torch.ones(1)), ("b", torch.ones(1)), ("b", torch.ones(1))], 100))


def test_extra_memory_is_one_bucket() -> None:
    """40 tensors of 1 KiB, each made when it is read: one buffer for all buckets, and no tensor
    is kept.
    """
    made: list[int] = []
    alive: list[weakref.ref] = []
    most = 0

    def allocate(size: int, device: torch.device) -> Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(40):
            tensor = torch.full((256,), float(number))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"t{number}", tensor
            del tensor

    total = sum(bucket.nbytes for bucket in buckets(stream(), 10_000, allocate=allocate))
    assert (total, made, most) == (40 * 1024, [10_000], 1)


def test_buckets_in_flight_keep_their_bytes() -> None:
    stream = [(str(number), torch.full((2,), float(number))) for number in range(7)]  # 8 bytes each
    window: list = []
    for bucket in buckets(stream, 24, in_flight=3):  # three buffers of one tensor
        window = [*window[-2:], bucket]
        assert [tensor[0].item() for in_flight in window for _, tensor in in_flight.tensors()] == [
            float(in_flight.entries[0].name) for in_flight in window
        ]
    assert len({bucket.data.data_ptr() for bucket in window}) == 3
