"""An engine over another one, which differs in how samples are made."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megatron_gspo.rollout.engine_protocol import RolloutEngine


class WrappedEngine:
    """All of `RolloutEngine` but `generate`: passed on to `engine`."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `RolloutEngine.update_weights`."""
        self.engine.update_weights(named_tensors, version=version)

    def pause(self) -> None:
        """See `RolloutEngine.pause`."""
        self.engine.pause()

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self.engine.resume()

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self.engine.close()
