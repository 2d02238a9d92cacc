"""Memory by kind; real tensors stand for the device's."""

import torch

from megatron_gspo.tools.rehearse.memory_log import MemoryLog


def allocate(log: MemoryLog, count: int, op: str = "empty") -> torch.Tensor:
    log.index += 1
    tensor = torch.empty(count)
    log.add(tensor, op)
    return tensor


def test_the_peak_is_what_was_alive_at_once() -> None:
    log = MemoryLog()
    log.kind = "activations"
    first = allocate(log, 10, "first")
    second = allocate(log, 20, "second")
    del second
    third = allocate(log, 5, "third")
    del first, third
    memory = log.result()
    assert memory.peak.total == 120
    assert memory.peak.op == "second"
    assert {row.op: row.bytes for row in memory.largest} == {"first": 40, "second": 80}
    assert log.total == 0


def test_a_view_is_not_counted_again() -> None:
    log = MemoryLog()
    tensor = allocate(log, 10)
    log.add(tensor[:5], "view")
    assert log.total == 40


def test_storages_are_given_another_kind() -> None:
    log = MemoryLog()
    tensor = allocate(log, 10)
    other = allocate(log, 1)
    assert log.relabel("weights", [tensor, tensor[2:]]) == 40
    assert (log.bytes["weights"], log.bytes["buffers"]) == (40, 4)
    del tensor, other
    assert log.bytes["weights"] == 0


def test_peaks_are_kept_by_phase() -> None:
    log = MemoryLog()
    for phase, most in (("build", 3), ("optimizer", 2)):
        log.phase = phase
        kept = [allocate(log, 1) for _ in range(most)]
        del kept
    memory = log.result()
    assert {phase: point.total for phase, point in memory.peaks.items()} == {
        "build": 12,
        "optimizer": 8,
    }


def test_freed_storage_of_a_live_tensor_is_seen() -> None:
    log = MemoryLog()
    tensor = allocate(log, 10)
    with log.watch_resizes():
        tensor.untyped_storage().resize_(0)
        assert log.total == 0
        tensor.untyped_storage().resize_(40)
        assert log.total == 40
    tensor.untyped_storage().resize_(0)
    assert log.total == 40
