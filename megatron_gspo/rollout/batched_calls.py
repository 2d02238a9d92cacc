"""Calls of coroutines to a function that blocks and takes many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class BatchedCalls(Generic[Request, Result]):
    """Requests that wait at the same time are one call of the function, in a thread of its own."""

    def __init__(
        self,
        function: Callable[[Sequence[Request]], Sequence[Result]],
        name: str,
        *,
        max_batch: int | None = None,
    ) -> None:
        """Start the thread.

        Args:
            function: a result for each request, in order.
            name: of the thread.
            max_batch: most requests of a call; None: all that wait.
        """
        self._function = function
        self._max_batch = max_batch
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []
        self._calling: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, request: Request) -> Result:
        """The request's result. Raises what the function raises, as all requests of the call do."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((request, result))
        if self._calling is None or self._calling.done():
            self._calling = loop.create_task(self._call_until_none_waits())
        return await result

    def close(self, *, wait: bool = True) -> None:
        """Call the function no more. wait: for the end of a call that runs."""
        self._executor.shutdown(wait=wait, cancel_futures=True)

    async def _call_until_none_waits(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            count = self._max_batch or len(self._waiting)
            # A request whose coroutine was cancelled wants no result any more.
            batch = [waiting for waiting in self._waiting[:count] if not waiting[1].done()]
            del self._waiting[:count]
            requests = [request for request, _ in batch]
            try:
                results = await loop.run_in_executor(self._executor, self._function, requests)
            except Exception as error:
                for _, result in batch:
                    if not result.done():
                        result.set_exception(error)
                continue
            for (_, result), value in zip(batch, results, strict=True):
                if not result.done():
                    result.set_result(value)
