"""What a pass does with the routers' choices."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.routing_replay.perturbation import PerturbedPass
from megatron_gspo.routing_replay.routes import RouteShape


@dataclass(frozen=True)
class ReplayOptions:
    """What the routers do in a pass.

    shape: sizes of the routes, and the layers that batches carry. replay: use the
    ``routed_experts`` of the batches. record: keep the live choices. balanced_padding: without
    ``replay``, positions that have no row in a sample's routes take balanced ones too, so that
    experts get the same tokens as when the recorded routes are replayed. compare: count where a
    live choice differs from the batches' routes. neighbours: with ``compare``, also count the
    experts that it shares with its token's route and those of the tokens beside it. entropy:
    measure the routers' entropy. storage: where recorded ids are kept, ``device`` or ``host``
    (pinned memory, copied asynchronously). perturbed_pass: what changes the live choices, None without.
    selected_positions: of sparse attention, whose selections are sampled; 0 without.
    """

    shape: RouteShape
    replay: bool = False
    record: bool = False
    balanced_padding: bool = False
    compare: bool = False
    neighbours: bool = False
    entropy: bool = False
    storage: str = "device"
    perturbed_pass: PerturbedPass | None = None
    selected_positions: int = 0

    @property
    def needs_routes(self) -> bool:
        """Whether the batches must carry routes."""
        return self.replay or self.compare
