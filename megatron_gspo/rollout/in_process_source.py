"""Groups from an engine in the trainer's processes: each rank generates a share and holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.group_source import GenerateOnCollect, Weights, engine_name
from megatron_gspo.rollout.sample_exchange import generate_on_ranks


class InProcessSource(GenerateOnCollect):
    """`GroupSource` over any `RolloutEngine`; generates in `collect`."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        vocab_size: int,
        group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        """A source of groups that `engine` generates.

        Args:
            group: ranks that share the prompts; None: this process alone.
            vocab_size: bound of the token ids.
            name: name of an engine that `engine` wraps.
        """
        super().__init__()
        self.engine_name = name or engine_name(type(engine))
        self._engine = engine
        self._vocab_size = vocab_size
        self._group = group

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> SampleBatch:
        """See `GroupSource.generate`."""
        return generate_on_ranks(
            self._engine,
            prompts,
            sampling,
            seed=seed,
            group=self._group,
            vocab_size=self._vocab_size,
        )

    def update_weights(self, weights: Weights, *, version: int) -> None:
        """See `GroupSource.update_weights`."""
        self._engine.update_weights(weights(), version=version)

    def pause(self, *, keep: bool) -> None:
        """See `GroupSource.pause`; nothing runs between calls."""
        if not keep:
            self._requests.clear()

    def score(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Nothing: there are no servers."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Nothing: there are no servers."""
        return {}

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
