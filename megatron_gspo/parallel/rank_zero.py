"""Work of one rank or of several: its error is raised on every rank, and rank 0's result is
returned on every rank.

Without this a rank that fails alone leaves the others waiting in their next collective until it
times out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_gspo.errors import RunError, UserError, first_line
from megatron_gspo.parallel.collectives import group_rank, group_size
from megatron_gspo.parallel.host_exchange import broadcast_bytes, max_over_ranks
from megatron_gspo.parallel.typed_messages import Type, decode, encode

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 sends to the others: the encoded value of its action, or its error."""

    value: bytes = b""
    error: UserError | None = None


def run_on_rank_zero(
    action: Callable[[], T],
    *,
    returns: Type = Any,
    error: type[UserError] = RunError,
    what: str = "rank 0 failed",
) -> T:
    """Run ``action`` on rank 0 and return its value on every rank. A collective of the world;
    ``action`` isn't one.

    If ``action`` raises, every rank raises. A ``UserError`` has the same class and message on all
    ranks. An ``OSError`` or ``ValueError`` becomes ``error("what: type: message")``. Any other
    exception is a bug: rank 0 raises it unchanged, with its traceback, and the other ranks raise
    ``error``.

    Args:
        returns: the type of its value, as `typed_messages` reads it; by default plain data without
            tuples.
        error, what: class and first words of the error for a failure that isn't a ``UserError``.
    """
    if dist.get_rank() != 0:
        outcome = decode(broadcast_bytes(None, dist.group.WORLD).tobytes(), _Outcome)
        if outcome.error is not None:
            raise outcome.error
        return decode(outcome.value, returns)
    value: T | None = None
    raised: Exception | None = None
    outcome = _Outcome()
    try:
        value = action()
        outcome = _Outcome(encode(value))
    except Exception as caught:
        raised = caught
        outcome = _Outcome(error=_as_user_error(caught, error, what))
    broadcast_bytes(encode(outcome), dist.group.WORLD)
    if outcome.error is None:
        return value  # type: ignore[return-value]  # of the action
    if not isinstance(raised, (UserError, OSError, ValueError)):
        raise raised  # type: ignore[misc]  # a bug, with its traceback
    raise outcome.error from raised if raised is not outcome.error else None


def run_on_every_rank(
    action: Callable[[], T], *, error: type[UserError] = RunError, what: str = "a rank failed"
) -> T:
    """Run each rank's own ``action`` and return its own value. A collective of the world; the
    actions aren't.

    If an action raises, every rank raises the failure of the lowest such rank; for the rest see
    `run_on_rank_zero`.
    """
    value: T | None = None
    raised: Exception | None = None
    failure: UserError | None = None
    try:
        value = action()
    except Exception as caught:
        raised = caught
        failure = _as_user_error(caught, error, what)
    size = dist.get_world_size()
    first = -int(
        max_over_ranks(np.array([-dist.get_rank() if failure else -size]), dist.group.WORLD)[0]
    )
    if first < size:
        sent = encode(failure) if dist.get_rank() == first else None
        received = broadcast_bytes(sent, dist.group.WORLD, first).tobytes()
        if raised is not None and not isinstance(raised, (UserError, OSError, ValueError)):
            raise raised
        shared: UserError = (
            failure if sent is not None and failure is not None else decode(received, UserError)
        )
        raise shared from (raised if raised is not shared else None)
    return value  # type: ignore[return-value]  # of the action


def raise_on_every_rank(failure: str, error: type[UserError]) -> None:
    """Raise ``error`` on every rank with the ``failure`` of the lowest rank whose own isn't empty;
    else return.

    A collective of the world.
    """
    if (first := first_failure(failure, dist.group.WORLD)) is not None:
        raise error(first[1])


def first_failure(failure: str, group: dist.ProcessGroup | None) -> tuple[int, str] | None:
    """The lowest rank of the group whose ``failure`` isn't empty, and its failure, on every
    rank; None without one.
    """
    size = group_size(group)
    failed_rank = np.array([-group_rank(group) if failure else -size], dtype=np.int64)
    rank = -int(max_over_ranks(failed_rank, group)[0])
    if rank == size:
        return None
    sent = failure.encode() if group_rank(group) == rank else None
    message = broadcast_bytes(sent, group, rank)
    return rank, message.tobytes().decode()


def _as_user_error(caught: Exception, error: type[UserError], what: str) -> UserError:
    """What the ranks raise."""
    if isinstance(caught, UserError):
        return caught
    return error(f"{what}: {type(caught).__name__}: {first_line(caught)}")
