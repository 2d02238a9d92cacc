"""What the routers of a pass chose, counted on this rank for several layers and micro-batches at
once: a few tokens cost as much as many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_gspo.mcore.device_copies import copy_to_host
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.routing_replay.statistics import expert_load, expert_overlap, router_entropy

# Scores, at most about, of the choices that are measured together.
_TOGETHER = 1 << 20


class LiveChoice(NamedTuple):
    """What a router has chosen for the ``t`` tokens of a micro-batch."""

    layer: int
    ids: Tensor
    """``[t, k]``"""

    scores: Tensor | None
    """``[t, experts]``, where their entropy is measured."""

    shares: Callable[[Tensor], Tensor]
    """Scores to the router's distribution over all experts."""


class CountedBatch(Protocol):
    """What is read and written of ``MicroBatchRoutes``."""

    is_counted: bool
    compare: bool
    weight: Tensor | None
    given: dict[int, Tensor]
    chosen: dict[int, Tensor]
    flipped: Tensor | None
    shared: Tensor | None

    @property
    def known_weight(self) -> Tensor: ...


Run = tuple[CountedBatch, list[LiveChoice]]
"""Choices of a micro-batch in consecutive layers."""


class PassCounts:
    """Sums over the micro-batches of a pass, of this rank; those over all ranks are the statistics
    of the pass. Choices wait until there are enough, or until the pass has ended.

    numbers: float64, all sums end to end: ``flips`` [layers], the shares of chosen experts that
    differ from the given routes, over known tokens, with ``options.compare``; ``entropy`` [layers]
    with ``options.entropy``; ``load`` [layers, experts] with that and ``options.record``; ``totals``
    [3], compared tokens, flipped ones, trained tokens.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self.options = options
        shape = options.shape
        has_load = options.entropy and options.record
        self.sizes = (
            shape.layers * options.compare,
            shape.layers * options.entropy,
            shape.layers * shape.num_experts * has_load,
            3,
        )
        self.numbers = torch.zeros(sum(self.sizes), dtype=torch.float64, device=compute_device())
        self.flips, self.entropy, load, self.totals = self.numbers.split(self.sizes)
        self.load = load.view(-1, shape.num_experts)
        self._waiting: list[tuple[CountedBatch, LiveChoice]] = []
        self._waiting_scores = 0

    def add(self, routes: CountedBatch, choice: LiveChoice) -> None:
        """Record and count a live choice, without a device synchronization."""
        self._waiting.append((routes, choice))
        self._waiting_scores += len(choice.ids) * self.options.shape.num_experts
        if self._waiting_scores > _TOGETHER:
            self.count_waiting()

    @torch.no_grad()
    def count_waiting(self) -> None:
        """Count the choices that wait."""
        waiting = self._waiting
        self._waiting = []
        self._waiting_scores = 0
        alike: dict[tuple[int, int, bool], list[Run]] = {}
        for routes, choices in _runs(waiting):
            key = (choices[0].layer, len(choices), routes.compare)
            alike.setdefault(key, []).append((routes, choices))
        for (first, count, compare), runs in alike.items():
            self._count(slice(first, first + count), runs, compare=compare)

    def _count(self, layers: slice, runs: Sequence[Run], *, compare: bool) -> None:
        """Count choices of several micro-batches in the same layers."""
        options = self.options
        by_layer = list(zip(*(choices for _, choices in runs), strict=True))
        # [layers, t of all micro-batches, k]
        ids = _stacked([[choice.ids for choice in choices] for choices in by_layer])
        ids = ids.to(options.shape.torch_dtype)
        sizes = [len(choices[0].ids) for _, choices in runs]
        if options.record:
            recorded = copy_to_host(ids) if options.storage == "host" else ids
            for (routes, choices), of_batch in zip(runs, recorded.split(sizes, 1), strict=True):
                numbers = [choice.layer for choice in choices]
                routes.chosen.update(zip(numbers, of_batch.unbind(), strict=True))
        batches = [routes for routes, _ in runs if routes.is_counted]
        if not batches:  # all of the same rank
            return
        if compare:
            self._compare(layers, batches, ids, sizes)
        if options.entropy:
            weight = joined([routes.weight for routes in batches if routes.weight is not None])
            shares = [
                choices[0].shares(joined([c.scores for c in choices if c.scores is not None]))
                for choices in by_layer
            ]
            entropy = router_entropy(_stacked([[values] for values in shares])) * weight
            self.entropy[layers] += entropy.sum(1, dtype=torch.float64)
            if options.record:
                self.load[layers] += expert_load(ids, weight, options.shape.num_experts)

    def _compare(
        self, layers: slice, batches: Sequence[CountedBatch], ids: Tensor, sizes: list[int]
    ) -> None:
        """Compare ids [layers, t of all micro-batches, k] with the given routes."""
        numbers = range(layers.start, layers.stop)
        given = _stacked([[routes.given[layer] for routes in batches] for layer in numbers])
        known = joined([routes.known_weight for routes in batches])
        k = ids.shape[-1]
        different = k - expert_overlap(ids, given)
        self.flips[layers] += (different.float() / k * known).sum(1, dtype=torch.float64)
        flipped = (different > 0).sum(0, dtype=torch.int16).split(sizes)
        for routes, of_batch in zip(batches, flipped, strict=True):
            routes.flipped = of_batch if routes.flipped is None else routes.flipped + of_batch
        if not self.options.neighbours:
            return
        # The rows beside a micro-batch's first and last one are of another; nobody reads these.
        rows = torch.stack([given, given.roll(-1, 1), given.roll(1, 1)])
        shared = expert_overlap(ids, rows).sum(1, dtype=torch.int16).split(sizes, 1)
        for routes, of_batch in zip(batches, shared, strict=True):
            routes.shared = of_batch if routes.shared is None else routes.shared + of_batch


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _stacked(by_layer: Sequence[Sequence[Tensor]]) -> Tensor:
    """``[layers, t, n]`` from ``[t_b, n]`` of each micro-batch b in each layer."""
    if len(by_layer) == 1:
        return joined(by_layer[0]).contiguous()[None]  # routes are strided by layer
    flat = torch.cat([tensor for of_layer in by_layer for tensor in of_layer])
    return flat.view(len(by_layer), -1, flat.shape[-1])


def _runs(choices: Sequence[tuple[CountedBatch, LiveChoice]]) -> list[Run]:
    """Choices in the order of their layers, divided where a layer is not the one after."""
    runs: list[Run] = []
    newest: dict[CountedBatch, list[LiveChoice]] = {}
    for routes, choice in choices:
        run = newest.get(routes)
        if run is None or choice.layer != run[-1].layer + 1:
            run = []
            newest[routes] = run
            runs.append((routes, run))
        run.append(choice)
    return runs
