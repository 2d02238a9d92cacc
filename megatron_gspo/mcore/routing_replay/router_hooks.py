"""Routing replay: at each router stands a gate through which a micro-batch's routes are recorded or replayed.

Routes are data. A ``RouteTable`` belongs to one micro-batch on one model chunk and travels into the layers with the
micro-batch's packed sequences, also when a layer runs again because its activations are recomputed. So nothing has to
be queued, and the order in which a pipeline schedule runs micro-batches doesn't matter.

Replay fixes *which* experts a token uses; their weights come from the live router, so its gradient lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_gspo.errors import RunError
from megatron_gspo.routing_replay.statistics import expert_overlap, router_entropy

TopK = Callable[..., tuple[Tensor, Tensor]]

# What would choose experts without asking the gate, or drop some of the replayed ones, by key of TransformerConfig.
_BYPASSES: dict[str, Callable[[Any], bool]] = {
    "moe_router_fusion": bool,
    "moe_router_load_balancing_type": lambda kind: bool({"sinkhorn", "quantile_balancing"} & set(_as_list(kind))),
    "moe_expert_capacity_factor": lambda factor: factor is not None,
    "moe_router_force_load_balancing": bool,
    "moe_router_force_biased": lambda bias: bias is not None,
    "moe_input_jitter_eps": lambda eps: eps is not None,
    "recompute_modules": lambda modules: "moe" in (modules or ()),
    "cuda_graph_impl": lambda kind: kind not in (None, "none"),  # a graph that is run again asks nobody
    "cuda_graph_scope": lambda scope: any("moe" in str(part) for part in _as_list(scope)),
}


class RoutingError(RunError):
    """Routes that can't be used, or weren't; one line naming the layer and the micro-batch."""


@dataclass
class RouteTable:
    """The routes of one micro-batch on this rank and model chunk; rows are the tokens that its routers see.

    given: ``[t, layers, k]`` expert ids, to be replayed or compared with; None where there are none.
    holes: ``[t]`` bool, rows of ``given`` that are unknown: the live router decides there. None: there are none.
    weight: ``[t]`` float32, 1 for a trained token and 0 for any other.
    replay, record: whether ``given`` is used, and whether the live router's choice is kept.
    compare, describe: whether that choice is compared with ``given``, and the router's entropy is taken.
    chosen: by layer, the recorded ids ``[t, k]``. flips, entropy: by layer, sums over ``weight``.
    flipped: ``[t]`` int16, layers of this chunk in which the token's choice differs from ``given``.
    uses: how often (layer, with gradient) has asked.
    """

    dtype: torch.dtype
    weight: Tensor
    given: Tensor | None = None
    holes: Tensor | None = None
    replay: bool = False
    record: bool = False
    compare: bool = False
    describe: bool = False
    store: Callable[[Tensor], Tensor] = lambda ids: ids
    chosen: dict[int, Tensor] = field(default_factory=dict)
    flips: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    flipped: Tensor | None = None
    uses: Counter[tuple[int, bool]] = field(default_factory=Counter)

    @property
    def known(self) -> Tensor:
        """``weight`` where ``given`` is known, ``[t]``."""
        return self.weight if self.holes is None else self.weight * ~self.holes

    def route(self, layer: int, scores: Tensor, live: TopK, are_logits: bool) -> tuple[Tensor, Tensor]:
        """The values ``[t, k]`` (with gradient) and ids of the experts that layer ``layer`` of the chunk is to use."""
        first = not any(self.uses[layer, grad] for grad in (False, True))
        self.uses[layer, torch.is_grad_enabled()] += 1
        values, ids = None, None
        if not self.replay or self.holes is not None or (first and (self.record or self.compare)):
            values, ids = live(scores)
        if first and ids is not None:
            self._note(layer, scores, ids, are_logits)
        if not self.replay:
            assert values is not None and ids is not None
            return values, ids
        assert self.given is not None
        wanted = self.given[:, layer].long()
        if self.holes is not None:
            assert ids is not None
            wanted = torch.where(self.holes[:, None], ids, wanted)
        return scores.gather(1, wanted), wanted

    @torch.no_grad()
    def _note(self, layer: int, scores: Tensor, ids: Tensor, are_logits: bool) -> None:
        """Keep what is asked for of a live choice; nothing here waits for a device."""
        small = ids.to(self.dtype)
        if self.record:
            self.chosen[layer] = self.store(small)
        if self.compare and self.given is not None:
            k = small.shape[1]
            missing = k - expert_overlap(small, self.given[:, layer])
            self.flips[layer] = (missing.float() / k * self.known).sum()
            flipped = (missing > 0).to(torch.int16)
            self.flipped = flipped if self.flipped is None else self.flipped + flipped
        if self.describe:
            entropy = router_entropy(scores.softmax(-1) if are_logits else scores)
            self.entropy[layer] = (entropy * self.weight).sum()


class RouteGate:
    """Stands where Megatron's ``RouterReplay`` would, at one router: it asks the table of the micro-batch at hand.

    ``layer``: position among the MoE layers of its model chunk; ``index``: among those of the whole model. Without a
    table the router chooses as ever.
    """

    def __init__(self, layer: int, index: int, config: Any) -> None:
        self.layer, self.index = layer, index
        self.layer_number: int | None = None  # megatron-core 0.19 sets it
        self._are_logits = config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
        self._table: RouteTable | None = None

    def enter(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the transformer layer: the micro-batch's sequences bring its table."""
        self._table = getattr(kwargs.get("packed_seq_params"), "routes", None)

    def leave(self, layer: Any, args: Any, output: Any) -> None:
        """Forward hook of the transformer layer: the table goes. Until then a router may ask again, which is counted
        and then refused."""
        self._table = None

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None,
                        default_compute_topk: TopK | None = None) -> tuple[Tensor, Tensor]:
        """What Megatron's routers call in place of their top-k; ``scores`` are logits or probabilities ``[t, E]``."""
        assert default_compute_topk is not None

        def live(values: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(values, topk, num_groups, group_topk)

        table = self._table
        return live(scores) if table is None else table.route(self.layer, scores, live, self._are_logits)


def attach_gates(chunk: torch.nn.Module) -> None:
    """Put a gate at every router of a model chunk.

    Raises ``RoutingError`` where the model's config has a router that chooses without asking.
    """
    refuse_bypasses(chunk.config)
    before = _moe_layers_before(chunk)
    for position, layer in enumerate(moe_layers(chunk)):
        gate = RouteGate(position, before + position, chunk.config)
        layer.mlp.router.router_replay = gate
        layer.register_forward_pre_hook(gate.enter, with_kwargs=True)
        layer.register_forward_hook(gate.leave)


def gates(chunk: torch.nn.Module) -> list[RouteGate]:
    """The gates of a model chunk, in the order of its MoE layers; ``RoutingError`` where a router has none."""
    found = [layer.mlp.router.router_replay for layer in moe_layers(chunk)]
    if not all(isinstance(gate, RouteGate) for gate in found):
        raise RoutingError("a router of the model has no gate for routing replay; call attach_gates(model) first")
    return found


def moe_layers(chunk: Any) -> list[Any]:
    """The transformer layers with experts of a model chunk, in order."""
    return [layer for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]


def refuse_bypasses(config: Any) -> None:
    """Raise ``RoutingError`` for a ``TransformerConfig`` whose routers choose, or drop, without asking a gate."""
    for key, bypasses in _BYPASSES.items():
        value = getattr(config, key, None)
        if bypasses(value):
            raise RoutingError(f"{key}={value} bypasses routing replay; leave it at its default")


def _moe_layers_before(chunk: Any) -> int:
    """MoE layers of the whole model before the first layer of this chunk."""
    frequency = chunk.config.moe_layer_freq
    first = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    if isinstance(frequency, int):
        return sum(layer % frequency == 0 for layer in range(first))
    return sum(frequency[:first])


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


