"""Requests that wait at the same time are one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megatron_gspo.rollout.batched_calls import BatchedCalls


@pytest.mark.parametrize("max_batch, sizes", [(None, [5]), (2, [2, 2, 1])])
def test_each_request_gets_its_result(max_batch: int | None, sizes: list[int]) -> None:
    seen: list[int] = []

    def double(requests: Sequence[int]) -> list[int]:
        seen.append(len(requests))
        return [2 * request for request in requests]

    async def ask() -> list[int]:
        calls = BatchedCalls(double, "double", max_batch=max_batch)
        results = await asyncio.gather(*map(calls.call, range(5)))
        calls.close()
        return results

    assert asyncio.run(ask()) == [0, 2, 4, 6, 8]
    assert seen == sizes


def test_a_failure_reaches_every_request_and_the_next_call_is_made() -> None:
    def fail_once(requests: Sequence[str]) -> list[str]:
        if "bad" in requests:
            raise ValueError("no")
        return list(requests)

    async def ask() -> list[object]:
        calls = BatchedCalls(fail_once, "fail")
        failures = await asyncio.gather(*map(calls.call, ("good", "bad")), return_exceptions=True)
        later = await calls.call("good")
        calls.close()
        return [*map(str, failures), later]

    assert asyncio.run(ask()) == ["no", "no", "good"]
