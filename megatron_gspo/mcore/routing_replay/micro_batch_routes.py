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
from functools import cached_property

import torch
from torch import Tensor

from megatron_gspo.data.packing import PackedBatch, PackLayout
from megatron_gspo.errors import RunError
from megatron_gspo.mcore.device_copies import copy_to_device
from megatron_gspo.mcore.process_groups import ProcessGroups, compute_device
from megatron_gspo.mcore.routing_replay.pass_counts import LiveChoice, PassCounts
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.selections import (
    SampledSelections,
    names_of,
    sampled_queries,
)
from megatron_gspo.routing_replay.perturbation import RoutedTokens
from megatron_gspo.routing_replay.routes import balanced_routes

TopK = Callable[[Tensor], tuple[Tensor, Tensor]]


class RoutingError(RunError):
    """Routes that can't be used, or that a router didn't use; one line naming the layer and the
    micro-batch.
    """


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
    the route of any trained token of the shard is known. counts: of the pass. chosen: by layer,
    recorded ids ``[t, k]``, complete after `check_uses`. flipped: ``[t]`` int16, layers in which the
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
        counts: PassCounts | None = None,
    ) -> None:
        self.options = options
        self.counts = PassCounts(options) if counts is None else counts
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
        self.flipped: Tensor | None = None
        self.shared: Tensor | None = None
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
        reads_given = self.options.replay or self.compare
        if given is not None and reads_given:
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
        if given is not None and reads_given:
            self.given.update(zip(layers, moved["given"].unbind(1), strict=True))

    @cached_property
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
        if first and ids is not None and (options.record or self.compare or options.entropy):
            kept_scores = scores.detach() if options.entropy else None
            self.counts.add(self, LiveChoice(layer, ids, kept_scores, shares))
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

    def check_uses(self, *, forward_only: bool) -> None:
        """Raise ``RoutingError`` unless every layer took its routes exactly once: in a training
        pass with a gradient (and again without, where activations are recomputed), else without.
        To be called of every micro-batch when the pass has ended; then all choices are counted."""
        self.counts.count_waiting()
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
    counts = PassCounts(options)
    return [
        MicroBatchRoutes(
            options, layout, groups, sequence_parallel=sequence_parallel, counts=counts
        )
        for layout in layouts
    ]


def _has_known_route(batch: PackedBatch) -> bool:
    trained = batch.loss_mask > 0
    return bool(
        (trained if batch.missing_routes is None else trained & ~batch.missing_routes).any()
    )
