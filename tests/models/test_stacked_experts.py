"""Tensors of all experts, by slices."""

from __future__ import annotations

import pytest
import torch

from megatron_gspo.models.stacked_experts import (
    checkpoint_names,
    stack_experts,
    stacked_sizes,
    tensor_of,
)


def test_names_of_slices():
    assert tensor_of("a.gate_up_proj[12]") == ("a.gate_up_proj", 12)
    assert tensor_of("a.3.weight") == ("a.3.weight", None)
    assert list(checkpoint_names(["x", "b[0]", "y", "b[1]", "c[0]"])) == ["x", "b", "y", "c"]
    assert stacked_sizes({"x": (5,), "b[0]": (2, 3), "b[1]": (2, 3)}, 2) == {
        "x": (5,),
        "b": (2, 2, 3),
    }


def test_slices_in_any_order_become_whole_tensors():
    b = torch.arange(12.0).view(2, 2, 3)
    c = torch.arange(4.0).view(2, 2)
    stream = [
        ("b[1]", b[1]),
        ("x", c[0]),
        ("c[0]", c[0]),
        ("b[0]", b[0].t().contiguous().t()),
        ("c[1]", c[1]),
    ]
    stacked = list(stack_experts(stream, 2))
    assert [name for name, _ in stacked] == ["x", "b", "c"]
    assert torch.equal(stacked[1][1], b) and torch.equal(stacked[2][1], c)
    with pytest.raises(AssertionError, match="b.* missing"):
        list(stack_experts(stream[:1], 2))
