"""What holds the tensors that outlive a step."""

import torch

from megatron_gspo.tools.rehearse.memory_log import MemoryLog
from megatron_gspo.tools.rehearse.retained import find_retained


class Dispatcher:
    probs: torch.Tensor | None = None


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.dispatcher = Dispatcher()
        self.seen: list[torch.Tensor] = []


def watched(log: MemoryLog, tensor: torch.Tensor) -> torch.Tensor:
    log.add(tensor, "op")
    return tensor


def make_log() -> MemoryLog:
    log = MemoryLog()
    log.phase, log.kind = "forward_backward", "activations"
    return log


def test_nothing_is_left_of_a_clean_step() -> None:
    log = make_log()
    watched(log, torch.ones(4))
    assert find_retained(log, [Layer()], "forward_backward") == ()


def test_attributes_of_modules_and_of_what_they_hold_are_named() -> None:
    log, layer = make_log(), Layer()
    layer.dispatcher.probs = watched(log, torch.ones(8))
    layer.seen.append(watched(log, torch.ones(4)))
    found = find_retained(log, [torch.nn.Sequential(layer)], "forward_backward")
    assert [(item.bytes, item.owner) for item in found] == [
        (32, "chunk0.0.dispatcher.probs"),
        (16, "chunk0.0.seen[0]"),
    ]
    assert "test_retained.py" in found[0].where_allocated[0]


def test_what_a_kept_graph_saves_is_named_by_the_tensor_that_keeps_it() -> None:
    log, layer = make_log(), Layer()
    saved = watched(log, torch.ones(4))
    layer.dispatcher.probs = watched(log, saved * layer.weight)
    del saved
    found = {item.owner for item in find_retained(log, [layer], "forward_backward")}
    assert found == {"chunk0.dispatcher.probs", "graph of chunk0.dispatcher.probs"}


def test_other_phases_and_kinds_are_left_out() -> None:
    log = make_log()
    kept = watched(log, torch.ones(4))
    log.phase = "optimizer"
    other = watched(log, torch.ones(4))
    log.relabel("weights", [kept])
    assert find_retained(log, [], "forward_backward") == ()
    del other
