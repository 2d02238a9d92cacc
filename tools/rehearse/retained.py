"""Tensors of a step that outlive it, and what holds them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gspo.tools.rehearse.call_sites import call_site
from megatron_gspo.tools.rehearse.memory_log import MemoryLog
from megatron_gspo.tools.rehearse.records import Retained

_MOST = 200


def find_retained(memory: MemoryLog, chunks: Sequence[Any], phase: str) -> tuple[Retained, ...]:
    """The activations of a phase that are still alive, the largest first, each with the
    attribute that holds it.
    """
    left = {
        key: entry
        for key, entry in memory.live.items()
        if entry.phase == phase and entry.kind == "activations"
    }
    if not left:
        return ()
    largest = sorted(left.items(), key=lambda item: -item[1].bytes)[:_MOST]
    owners = _owners({key for key, _ in largest}, chunks)
    return tuple(
        Retained(
            entry.bytes,
            entry.shape,
            str(entry.dtype).removeprefix("torch."),
            call_site(entry.frames),
            owners[key],
        )
        for key, entry in largest
    )


def _owners(wanted: set[int], chunks: Sequence[Any]) -> dict[int, str]:
    """By storage: the attribute that holds a tensor of it, or whose autograd graph does."""
    found: dict[int, str] = {}
    graphs: list[tuple[str, Any]] = []
    for name, tensor in _attributes(chunks):
        key = _key(tensor)
        if key in wanted:
            found.setdefault(key, name)
        if tensor.grad_fn is not None:
            graphs.append((name, tensor.grad_fn))
    for name, node in graphs:
        for tensor in _saved(node):
            if (key := _key(tensor)) in wanted:
                found.setdefault(key, f"graph of {name}")
    return found | _holders(wanted - set(found))


def _attributes(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes of modules, and of plain objects that a module holds."""
    for i, chunk in enumerate(chunks):
        for path, module in chunk.named_modules():
            name = ".".join(filter(None, (f"chunk{i}", path)))
            for key, value in vars(module).items():
                yield from _tensors(f"{name}.{key}", value)
                if hasattr(value, "__dict__") and not isinstance(
                    value, (torch.nn.Module, Tensor, type)
                ):
                    for inner, item in list(vars(value).items()):
                        yield from _tensors(f"{name}.{key}.{inner}", item)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)


def _saved(node: Any) -> Iterator[Tensor]:
    """Tensors that a graph's nodes saved for the backward."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
        # A leaf: the detached input of recomputed layers, and its gradient.
        if hasattr(node, "variable"):
            yield from (
                tensor for tensor in (node.variable, node.variable.grad) if tensor is not None
            )
        for name in dir(node):
            if name == "saved_tensors" or (
                name.startswith("_saved_") and not name.startswith("_saved_self_sym")
            ):
                try:
                    value = getattr(node, name)
                except RuntimeError:  # freed by the backward
                    continue
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, Tensor):
                        yield item


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _holders(wanted: set[int]) -> dict[int, str]:
    """By storage: types of what refers to its tensors, where no attribute of the model does. The
    garbage collector's objects are walked twice, for any number of storages."""
    if not wanted:
        return {}
    tensors = [
        item for item in gc.get_objects() if isinstance(item, Tensor) and _key(item) in wanted
    ]
    ids = {id(tensor) for tensor in tensors}
    names: dict[int, set[str]] = {key: set() for key in wanted}
    for referrer in gc.get_referrers(*tensors):
        if referrer is not tensors and type(referrer).__name__ not in ("frame", "list_iterator"):
            for held in gc.get_referents(referrer):
                if id(held) in ids:
                    names[_key(held)].add(_describe(referrer, held))
    return {
        key: "; ".join(sorted(found)[:3]) or "an autograd graph" for key, found in names.items()
    }


def _describe(referrer: Any, tensor: Tensor) -> str:
    if isinstance(referrer, dict):
        keys = [str(key) for key, value in referrer.items() if value is tensor][:1]
        return f"dict[{keys[0]}]" if keys else "dict"
    return type(referrer).__name__
