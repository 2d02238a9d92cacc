from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_gspo.errors import EngineError, RunError, UserError
from megatron_gspo.parallel.rank_zero import (
    raise_on_every_rank,
    run_on_every_rank,
    run_on_rank_zero,
)
from tests.support.distributed import run_distributed


class Unpicklable(UserError):
    """As an error whose constructor takes something else than the message."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")


def raising(error: Exception):
    def action():
        assert dist.get_rank() == 0, "only rank 0 runs it"
        raise error

    return action


def message(failure: Exception, **options) -> tuple[str, str]:
    """(class, message) of what this rank raises where the action raises ``failure`` on rank 0."""
    with pytest.raises(Exception) as caught:
        run_on_rank_zero(raising(failure), **options)
    dist.barrier()  # no rank is left waiting
    return type(caught.value).__name__, str(caught.value)


def cause(failure: Exception) -> str:
    """The class of the cause of what this rank raises where the action raises ``failure`` on
    rank 0.
    """
    try:
        run_on_rank_zero(raising(failure))
    except UserError as error:
        return type(error.__cause__).__name__
    raise AssertionError("nothing was raised")


def every_case(rank: int, world_size: int) -> dict:
    ran = []
    return {
        "value": run_on_rank_zero(lambda: ran.append(rank) or {"rank": rank}),
        "ran": len(ran),
        "none": run_on_rank_zero(lambda: None),
        "user error": message(EngineError("server 3: no answer")),
        "unpicklable": message(Unpicklable("lr", "is negative"), error=EngineError),
        "disk": message(OSError("disk full"), error=RunError, what="not saved"),
        "bug": message(TypeError("a bug\nof two lines"), error=EngineError),
        "causes": [cause(OSError("disk full")), cause(EngineError("no answer"))],
    }


def test_every_rank_gets_rank_zeros_value_or_its_error():
    first, second, third = run_distributed(every_case, 3)
    assert [outcome["value"] for outcome in (first, second, third)] == [{"rank": 0}] * 3
    assert [outcome["ran"] for outcome in (first, second, third)] == [1, 0, 0]
    for outcome in (first, second, third):
        assert outcome["none"] is None
        assert outcome["user error"] == ("EngineError", "server 3: no answer")
        assert outcome["unpicklable"][1] == "lr: is negative"
        assert outcome["disk"] == ("RunError", "not saved: OSError: disk full")
    assert first["causes"] == ["OSError", "NoneType"], "no error is its own cause"
    assert second["causes"] == third["causes"] == ["NoneType", "NoneType"]
    assert first["bug"] == (
        "TypeError",
        "a bug\nof two lines",
    ), "rank 0 keeps the traceback of a bug"
    assert second["bug"] == third["bug"] == ("EngineError", "rank 0 failed: TypeError: a bug")


def one_fails(rank: int, world_size: int) -> list[str]:
    raise_on_every_rank("", EngineError)
    errors = []
    for failing in ((1,), (1, 2)):
        with pytest.raises(EngineError) as caught:
            raise_on_every_rank(f"rank {rank}" if rank in failing else "", EngineError)
        errors.append(str(caught.value))
    return errors


def test_a_failure_of_one_rank_is_raised_on_all():
    assert run_distributed(one_fails, 3) == [["rank 1", "rank 1"]] * 3


def failing_on(rank: int, failures: dict[int, Exception]) -> tuple[str, str]:
    """(class, message) of what this rank raises."""

    def action() -> int:
        if rank in failures:
            raise failures[rank]
        return rank

    try:
        return "", str(run_on_every_rank(action, error=EngineError, what="the engine failed"))
    except Exception as error:
        dist.barrier()  # nobody is left waiting
        return type(error).__name__, str(error)


def own_actions(rank: int, world_size: int) -> list[tuple[str, str]]:
    return [
        failing_on(rank, {}),
        failing_on(rank, {1: RunError("no space"), 2: EngineError("no answer")}),
        failing_on(rank, {2: ValueError("a wrong shape")}),
        failing_on(rank, {1: TypeError("a bug\nof two lines")}),
    ]


def test_every_rank_gets_its_own_value_or_the_error_of_the_lowest_rank():
    outcomes = run_distributed(own_actions, 3)
    values, users, bad, bugs = zip(*outcomes, strict=True)
    assert values == (("", "0"), ("", "1"), ("", "2"))
    assert users == (("RunError", "no space"),) * 3
    assert bad == (("EngineError", "the engine failed: ValueError: a wrong shape"),) * 3
    told = ("EngineError", "the engine failed: TypeError: a bug")
    assert bugs == (told, ("TypeError", "a bug\nof two lines"), told)
