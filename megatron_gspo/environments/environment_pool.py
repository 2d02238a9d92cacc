"""Steps of environments, in worker processes with a time limit or in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_gspo.environments.environment import (
    EnvironmentLoadError,
    StepRequest,
    load_environments,
)
from megatron_gspo.rewards.worker import Reply
from megatron_gspo.rewards.worker_pool import RewardPool, Served

_SERVED = Served(
    module="megatron_gspo.environments.environment_worker",
    what="environment",
    refusal=EnvironmentLoadError,
    prompt_of=lambda request: request.prompt,
)


class EnvironmentPool:
    """Steps environments of one factory.

    With a time limit they run in worker processes, which may crash and are killed when a step takes
    too long: that episode fails, and the environments of the others are built again and their
    responses repeated. timeout None: they run in this process, without protection.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        *,
        timeout: float | None = 10.0,
        workers: int = 1,
    ) -> None:
        """name, options: see `load_environments`. timeout: seconds a step.

        Raises EnvironmentLoadError in one line if the factory can't be loaded.
        """
        self._here = load_environments(name, options) if timeout is None else None
        self._pool = None
        if timeout is not None:
            self._pool = RewardPool(name, options, timeout=timeout, workers=workers, served=_SERVED)

    def step(self, requests: Sequence[StepRequest]) -> list[Reply]:
        """A reply for each, in their order; the value is the fields of a `Turn`."""
        if self._pool is not None:
            return self._pool.run(requests)
        assert self._here is not None
        return [self._here.answer(request) for request in requests]

    def close(self) -> None:
        """End the worker processes. May be called again."""
        if self._pool is not None:
            self._pool.close()
