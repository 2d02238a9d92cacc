"""Checkpoints that hold all experts of a layer in one tensor, experts first (gpt-oss).

A rule names an expert's slice of it: ``mlp.experts.down_proj[{expert}]``. Readers read slices by
these names; streams of slices are put together here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

_SLICE = re.compile(r"(.+)\[(\d+)\]")


def tensor_of(name: str) -> tuple[str, int | None]:
    """The checkpoint's tensor that a name is of, and the expert if it is a slice's name."""
    match = _SLICE.fullmatch(name)
    return (name, None) if match is None else (match[1], int(match[2]))


def checkpoint_names(names: Iterable[str]) -> Iterator[str]:
    """The names of the tensors that hold these tensors and slices, each once, in their order."""
    return iter(dict.fromkeys(tensor_of(name)[0] for name in names))


def stacked_sizes(sizes: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """The sizes of the tensors that hold these tensors and slices."""
    whole_sizes = {}
    for name, size in sizes.items():
        whole, expert = tensor_of(name)
        whole_sizes[whole] = size if expert is None else (experts, *size)
    return whole_sizes


def stack_experts(
    tensors: Iterable[tuple[str, Tensor]], experts: int
) -> Iterator[tuple[str, Tensor]]:
    """A stream of tensors and slices as one of whole tensors, each sent when its last slice has
    come.

    Memory: the experts of the layers that are begun, of streams in the order of the layers one
    layer's.
    """
    begun: dict[str, tuple[Tensor, set[int]]] = {}
    for name, tensor in tensors:
        whole, expert = tensor_of(name)
        if expert is None:
            yield name, tensor
            continue
        if whole not in begun:
            begun[whole] = tensor.new_empty(experts, *tensor.shape), set()
        stack, filled = begun[whole]
        stack[expert].copy_(tensor)
        filled.add(expert)
        if len(filled) == experts:
            del begun[whole]
            yield whole, stack
    assert not begun, f"slices of {sorted(begun)} are missing"
