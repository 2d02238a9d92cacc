"""Copies to the device: values, types, and one transfer for any number of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.mcore.device_copies import copy_to_device

TENSORS = {
    "tokens": torch.tensor([3, 1, 151_935]),
    "mask": torch.tensor([[True, False, True]]),
    "none": torch.zeros(0),
    "routes": torch.arange(24).to(torch.uint16).view(4, 3, 2)[:, 1:],  # not contiguous
    "small": torch.tensor([7], dtype=torch.uint8),
    "floats": torch.tensor([0.5, -2.0, torch.inf]),
    "double": torch.tensor(0.1, dtype=torch.float64),
}


class Transfers(TorchDispatchMode):
    """Counts operations whose results are on another device than their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if (
            isinstance(out, torch.Tensor)
            and isinstance(source, torch.Tensor)
            and source.device != out.device
        ):
            self.flags.append((kwargs or {}).get("non_blocking"))
        return out


def test_copies_have_the_values_and_int32_in_place_of_int64():
    copies = copy_to_device(TENSORS, "cpu")
    assert list(copies) == list(TENSORS)
    for name, value in TENSORS.items():
        wanted = value.int() if value.dtype == torch.int64 else value
        assert copies[name].dtype == wanted.dtype and torch.equal(copies[name], wanted), name
        assert copies[name].is_contiguous()
    assert len({value.untyped_storage().data_ptr() for value in copies.values()}) == 1
    TENSORS["floats"][0] = 0.25
    assert copies["floats"][0] == 0.5, "a copy"


def test_one_transfer_that_does_not_block():
    with Transfers() as transfers:
        copies = copy_to_device(TENSORS, "meta")
    assert transfers.flags == [True]
    assert {value.device.type for value in copies.values()} == {"meta"}
    assert [value.shape for value in copies.values()] == [value.shape for value in TENSORS.values()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_the_copy_to_a_gpu_is_right_while_the_host_goes_on():
    expected = {name: value.clone() for name, value in TENSORS.items()}
    copies = [copy_to_device(TENSORS, "cuda") for _ in range(100)][-1]
    for name, value in expected.items():
        assert torch.equal(
            copies[name].cpu(), value.int() if value.dtype == torch.int64 else value
        ), name
