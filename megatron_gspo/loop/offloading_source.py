"""The trainer's memory while responses are generated on the trainer's own devices
(``rollout.offload_trainer``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.rollout.group_source import GroupSource, Weights
from megatron_gspo.weight_transport.weight_source import WeightSource


class OffloadingSource:
    """`GroupSource` over another one, whose engine has the devices while it generates.

    The policies' weights, gradients and optimizer state are in host memory from the first request,
    or the end of a weight update, until `pause`; a weight update reads the weights on the device.
    If the trainer needs gradients or optimizer state before, as for a checkpoint, the engine is
    paused first.
    """

    def __init__(
        self, source: GroupSource, policy: Policy, reference: Policy | None = None
    ) -> None:
        """reference: released as well, and the policy's critic; their next passes take back
        what they need.
        """
        self.engine_name = source.engine_name
        self._source = source
        self._policy = policy
        self._reference = reference
        self._idle = False  # paused, without a request since
        for trained in policy.trained.values():
            trained.memory.make_room = self._make_room

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> None:
        """See `GroupSource.submit`."""
        self._release()
        self._source.submit(prompts, sampling, seed=seed)

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        """See `GroupSource.collect`."""
        self._release()
        return self._source.collect(count, oldest_version=oldest_version)

    def pending(self) -> list[int]:
        """See `GroupSource.pending`."""
        return self._source.pending()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`."""
        self._release()
        return self._source.generate(prompts, sampling, seed=seed)

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`.

        A tensor of the stream is valid until the next one is read.
        """

        def released_at_the_end(
            source: WeightSource | None = None, /
        ) -> Iterator[tuple[str, Tensor]]:
            yield from weights(source)
            if source is None or source.is_last:
                self._release()

        self._release(keep_weights=True)
        self._source.update_weights(released_at_the_end, version=version)

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`. The policy is on its device again."""
        self._source.pause(keep=keep)
        self._idle = True
        self._policy.memory.restore()

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """See `GroupSource.score`."""
        self._release()
        return self._source.score(sequences)

    def metrics(self) -> dict[str, float]:
        """See `GroupSource.metrics`."""
        return self._source.metrics()

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _release(self, *, keep_weights: bool = False) -> None:
        self._idle = False
        self._policy.memory.release(keep_weights=keep_weights)
        for other in (self._reference, self._policy.critic):
            if other is not None:
                other.memory.release()

    def _make_room(self) -> None:
        if not self._idle:
            # It has failed: what is about to be done is to save the run.
            with contextlib.suppress(SharedEngineError):
                self._source.pause(keep=True)
            self._idle = True
