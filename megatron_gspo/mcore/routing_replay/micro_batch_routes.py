"""The routes of one micro-batch: what its routers record, replay and compare in a pass over a
mini-batch.

Routes are data. A ``MicroBatchRoutes`` travels into the layers with the micro-batch's packed
sequences, also when a layer runs again because its activations are recomputed. So nothing is
queued, and the order in which a pipeline schedule runs micro-batches doesn't matter.

Replay fixes *which* experts a token uses. Their weights come from the live router, which keeps its
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch, PackLayout
from megatron_gspo.errors import RunError
from megatron_gspo.mcore.device_copies import copy_to_device, copy_to_host
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.mcore.routing_replay.selections import (
    SampledSelections,
    names_of,
    sampled_queries,
)
from megatron_gspo.routing_replay.perturbation import PerturbedPass, RoutedTokens
from megatron_gspo.routing_replay.routes import RouteShape, balanced_routes
from megatron_gspo.routing_replay.statistics import expert_overlap, router_entropy

TopK = Callable[[Tensor], tuple[Tensor, Tensor]]

# Scores, at most about, of the layers that are measured together: few tokens cost as much as many.
_TOGETHER = 1 << 20


class RoutingError(RunError):
    """Routes that can't be used, or that a router didn't use; one line naming the layer and the
    micro-batch.
    """


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


class _LiveChoice(NamedTuple):
    """What a router has chosen, which is not measured yet."""

    layer: int
    ids: Tensor
    """``[t, k]``"""

    scores: Tensor
    """``[t, experts]``"""

    shares: Callable[[Tensor], Tensor]


class MicroBatchRoutes:
    """The routes of one micro-batch on this rank. Rows are the ``t`` tokens that this rank's
    routers see.

    Layers are numbered among the MoE layers of the whole model.

    layout: of the whole micro-batch. rows: this rank's part of its context-parallel shard. layers:
    those that have been given their routes. weight: ``[t]`` float32, 1 for a trained token and 0
    for any other. given: by layer, ``[t, k]`` expert ids to replay or compare with. missing:
    ``[t]`` bool, rows of ``given`` that are unknown and left to the live router, or None. tokens:
    ``[t]`` for a perturbation, or None. padding, balanced: ``[t]`` bool, the rows that take the
    balanced routes ``[t, k]``, or None. compare: whether choices are compared, that is whether
    the route of any trained token of the shard is known. chosen: by layer, recorded ids ``[t, k]``.
    flips, entropy: by layer, sums over ``weight``. flipped: ``[t]`` int16, layers in which the
    token's choice differs from ``given``. shared: ``[3, t]`` int16, experts that the token's
    choices share with ``given`` of its own row, the next and the previous one, summed over the
    layers. uses: how often (layer, with gradient) was routed. bytes_moved: by this rank between
    host and device. selections: sampled ones of sparse attention, which reports them here, or None.
    """

    def __init__(
        self,
        options: ReplayOptions,
        layout: PackLayout | PackedBatch,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool,
    ) -> None:
        self.options = options
        self.groups = groups
        self.layout = PackLayout(layout.cu_seqlens, layout.rows, layout.micro_batch)
        rank = groups.tp.rank() if sequence_parallel else 0
        ranks = groups.tp.size() if sequence_parallel else 1
        size = int(layout.cu_seqlens[-1]) // groups.cp.size() // ranks
        self.rows = slice(rank * size, (rank + 1) * size)
        # without sequence parallelism all tensor-parallel ranks see the same tokens, which count
        # once
        self.is_counted = sequence_parallel or groups.tp.rank() == 0
        self.compare = False
        self.layers: list[int] = []
        self.weight: Tensor | None = None
        self.missing: Tensor | None = None
        self.tokens: RoutedTokens | None = None
        self.padding: Tensor | None = None
        self.balanced: Tensor | None = None
        self.given: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}
        self.flips: dict[int, Tensor] = {}
        self.entropy: dict[int, Tensor] = {}
        self.flipped: Tensor | None = None
        self.shared: Tensor | None = None
        self._unmeasured_layers = 0
        self._unmeasured: list[_LiveChoice] = []
        self.uses: Counter[tuple[int, bool]] = Counter()
        self.bytes_moved = 0
        self.selections: SampledSelections | None = None

    def begin_chunk(self, shard: PackedBatch, layers: Sequence[int]) -> None:
        """Take the routes of a model chunk's MoE layers, contiguous, from the context-parallel
        shard of this batch.

        Raises ``RoutingError`` for layers that were begun before, and for a batch without the
        routes that it needs.
        """
        if not layers:
            return
        number = self.layout.micro_batch
        if layers[0] in self.layers:
            raise RoutingError(
                f"micro-batch {number} went through the same layers twice in one pass"
            )
        given = shard.routed_experts
        missing = shard.missing_routes
        if given is None and self.options.needs_routes:
            raise RoutingError(f"micro-batch {number} carries no routes; pack it with routes")
        wanted = {}
        if self.weight is None:
            self.compare = self.options.compare and _has_known_route(shard)
            wanted["weight"] = shard.loss_mask[self.rows]
            if missing is not None:
                wanted["missing"] = missing[self.rows]
            if self.options.perturbed_pass is not None:
                names = torch.tensor(shard.sequences)[shard.segment_ids[self.rows]]
                tokens = torch.stack([*names.unbind(1), shard.position_ids[self.rows]])
                wanted["tokens"] = tokens.view(torch.int32)  # as int64 it would be shortened
            if self.options.selected_positions:
                queries = sampled_queries(shard, self.options.selected_positions)
                wanted["queries"] = queries
            if self.options.balanced_padding:
                positions = shard.position_ids[self.rows]
                routes = balanced_routes(positions.numpy(), self.options.shape)
                wanted["padding"] = ~shard.is_fed[self.rows]
                wanted["balanced"] = torch.from_numpy(routes[:, 0].copy())
        if given is not None:
            first = self.options.shape.held_layers.index(layers[0])
            wanted["given"] = given[self.rows][:, first : first + len(layers)]
        moved = self._to_device(wanted)
        self.weight = moved.get("weight", self.weight)
        self.missing = moved.get("missing", self.missing)
        if "tokens" in moved:
            self.tokens = RoutedTokens(*moved["tokens"].view(torch.int64))
        if "queries" in moved:
            self.selections = SampledSelections(names_of(shard, queries), moved["queries"])
        self.padding = moved.get("padding", self.padding)
        self.balanced = moved.get("balanced", self.balanced)
        self.layers += layers
        self._unmeasured_layers += len(layers)
        if given is not None:
            self.given.update(zip(layers, moved["given"].unbind(1), strict=True))

    @property
    def known_weight(self) -> Tensor:
        """``weight`` where ``given`` is known, ``[t]``."""
        assert self.weight is not None
        return self.weight if self.missing is None else self.weight * ~self.missing

    def route(
        self,
        layer: int,
        scores: Tensor,
        top_k: TopK,
        *,
        are_logits: bool,
        shares: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The values ``[t, k]`` (with gradient) and ids of the experts that ``layer`` uses.

        scores: ``[t, experts]``, logits or probabilities. top_k: the live router's choice among
        scores. shares: scores to the router's distribution over all experts.
        """
        options = self.options
        choose, weights = self._perturbed(layer, scores, are_logits)
        first = not any(self.uses[layer, grad] for grad in (False, True))
        self.uses[layer, torch.is_grad_enabled()] += 1
        values = None
        ids = None
        if (
            not options.replay
            or self.missing is not None
            or (first and (options.record or self.compare))
        ):
            values, ids = top_k(choose)
            if choose is not weights:
                values = weights.gather(1, ids)
        if first and ids is not None:
            self._measure(layer, scores, ids, shares)
        if not options.replay:
            assert values is not None and ids is not None
            if self.padding is None or self.balanced is None:
                return values, ids
            used = torch.where(self.padding[:, None], self.balanced.long(), ids)
            return weights.gather(1, used), used
        replayed = self.given[layer].long()
        if self.missing is not None:
            assert ids is not None
            replayed = torch.where(self.missing[:, None], ids, replayed)
        return weights.gather(1, replayed), replayed

    def _perturbed(self, layer: int, scores: Tensor, are_logits: bool) -> tuple[Tensor, Tensor]:
        """The scores that experts are chosen by and those that they are weighed by; ``scores``
        itself where they do not change.
        """
        if self.options.perturbed_pass is None:
            return scores, scores
        assert self.tokens is not None
        logits = scores if are_logits else scores.log()
        chosen_by, weighed_by = self.options.perturbed_pass(logits, layer, self.tokens)

        def as_scores(values: Tensor) -> Tensor:
            if values is logits:
                return scores
            values = values.to(scores.dtype)
            return values if are_logits else values.softmax(-1)

        choose = as_scores(chosen_by)
        return choose, choose if weighed_by is chosen_by else as_scores(weighed_by)

    @torch.no_grad()
    def _measure(
        self, layer: int, scores: Tensor, ids: Tensor, shares: Callable[[Tensor], Tensor]
    ) -> None:
        """Record what the options select of a live choice, without a device synchronization."""
        ids = ids.to(self.options.shape.torch_dtype)
        self._unmeasured_layers -= 1
        if self.options.record:
            self.chosen[layer] = copy_to_host(ids) if self.options.storage == "host" else ids
        if self.compare or self.options.entropy:
            self._unmeasured.append(_LiveChoice(layer, ids, scores.detach(), shares))
        size = sum(choice.scores.numel() for choice in self._unmeasured)
        if self._unmeasured and (not self._unmeasured_layers or size > _TOGETHER):
            self._measure_together(self._unmeasured)
            self._unmeasured = []

    def _measure_together(self, choices: Sequence[_LiveChoice]) -> None:
        """Compare the choices of some layers with ``given``, and take their entropy."""
        assert self.weight is not None
        layers = [choice.layer for choice in choices]
        if self.compare:
            ids = torch.stack([choice.ids for choice in choices])  # [layers, t, k]
            given = torch.stack([self.given[layer] for layer in layers])
            k = ids.shape[-1]
            different = k - expert_overlap(ids, given)
            if self.options.neighbours:
                rows = torch.stack([given, given.roll(-1, 1), given.roll(1, 1)])
                shared = expert_overlap(ids, rows).sum(1, dtype=torch.int16)
                self.shared = shared if self.shared is None else self.shared + shared
            flips = (different.float() / k * self.known_weight).sum(1)
            self.flips.update(zip(layers, flips.unbind(), strict=True))
            flipped = (different > 0).sum(0, dtype=torch.int16)
            self.flipped = flipped if self.flipped is None else self.flipped + flipped
        if self.options.entropy:
            shares = torch.stack([choice.shares(choice.scores) for choice in choices])
            entropy = (router_entropy(shares) * self.weight).sum(1)
            self.entropy.update(zip(layers, entropy.unbind(), strict=True))

    def check_uses(self, *, forward_only: bool) -> None:
        """Raise ``RoutingError`` unless every layer took its routes exactly once: in a training
        pass with a gradient (and again without, where activations are recomputed), else without."""
        for layer in self.layers:
            without = self.uses[layer, False]
            with_gradient = self.uses[layer, True]
            right = (
                (without, with_gradient) == (1, 0)
                if forward_only
                else with_gradient == 1 and without <= 1
            )
            if not right:
                raise RoutingError(
                    f"the router of MoE layer {layer} took its routes of micro-batch"
                    f" {self.layout.micro_batch} {with_gradient} times with and {without} times"
                    " without a gradient; expected once"
                )

    def _to_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        device = compute_device()
        self.bytes_moved += (
            0 if device.type == "cpu" else sum(value.nbytes for value in tensors.values())
        )
        return copy_to_device(tensors, device)


def routes_of_mini_batch(
    options: ReplayOptions | None,
    layouts: Sequence[PackLayout],
    groups: ProcessGroups,
    *,
    sequence_parallel: bool,
) -> list[MicroBatchRoutes] | None:
    """A new ``MicroBatchRoutes`` for each micro-batch of this rank; None without options."""
    if options is None:
        return None
    return [
        MicroBatchRoutes(options, layout, groups, sequence_parallel=sequence_parallel)
        for layout in layouts
    ]


def _has_known_route(batch: PackedBatch) -> bool:
    trained = batch.loss_mask > 0
    return bool(
        (trained if batch.missing_routes is None else trained & ~batch.missing_routes).any()
    )
