"""How many bytes a run writes, from the sizes of its model. Close upper bounds, not guarantees."""

from __future__ import annotations

from dataclasses import dataclass

_MAIN = 4  # bytes a parameter of the float32 weights, which are the model's own if it is in float32
_MOMENTS = 8  # of Adam's two moments


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter, by model.dtype


@dataclass(frozen=True)
class Needs:
    """Bytes. checkpoint: one of the run's own, with optimizer state. checkpoints: how many there are at most, the one
    being written among them. export: the Hugging Face directory at the end; weights: copies for servers (weight_route:
    disk)."""

    checkpoint: int
    checkpoints: int
    export: int
    weights: int = 0

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export + self.weights

    @property
    def smallest(self) -> int:
        """What the run can't do with less than: two checkpoints, since the last stays until the next is whole."""
        return max(min(self.checkpoints, 2) * self.checkpoint, self.export) + self.weights


def needs(
    parameters: int, *, weight_bytes: int, keep: int, saves: bool, exports: bool, weight_copies: int = 0,
    adapters: int | None = None,
) -> Needs:  # fmt: skip
    """weight_bytes: of a parameter in the model's dtype. keep: checkpoints that stay. weight_copies: for servers.
    adapters: their parameters, if they are what is trained: checkpoints hold them alone, the export both."""
    model = parameters * weight_bytes
    trained = parameters if adapters is None else adapters
    return Needs(
        checkpoint=trained * (_MOMENTS + _MAIN + weight_bytes % _MAIN) if saves else 0,
        checkpoints=keep + 1 if saves else 0,
        export=model + (adapters or 0) * weight_bytes if exports else 0,
        weights=model * weight_copies,
    )
