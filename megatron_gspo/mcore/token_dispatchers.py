"""Token dispatchers for experts: Megatron's, with a permutation of known size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens, sum_copies


@dataclass(frozen=True)
class LastExpertFirst:
    """What rows a rank's experts get, the last expert's first. In this order the experts' weights
    are in Megatron's parameter buffer.

    counts: [experts], rows of each expert, the last first. copies: where the experts get tokens, and
    their rows are these copies.
    """

    counts: Tensor
    copies: TokenCopies | None = None


class MoEStaticTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with a permutation of known size: each token has ``moe_router_topk``
    experts.

    Megatron's own selects by a mask, for which the host waits twice per pass, and adds up a token's
    experts in the dtype of the activations. What a rank receives it cuts into chunks, one for each
    expert and rank, and joins them again.

    last_first: it gives the experts a `LastExpertFirst` in place of the number of their tokens.
    """

    last_first: bool = False
    # Between dispatch and combine:
    copies: TokenCopies | None = None
    received: TokenCopies | None = None
    probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.probs = probs.detach()  # combine_preprocess reads its dtype
        self.hidden_shape = hidden_states.shape
        self.copies = self._copies(routing_map)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = tokens if self._experts_copy else copy_tokens(tokens, self.copies)
        return rows, probs.reshape(-1).index_select(0, self.copies.entry)

    @property
    def _experts_copy(self) -> bool:
        """Whether the experts get tokens, and copy them."""
        return False

    def _copies(self, routing_map: Tensor) -> TokenCopies:
        return TokenCopies.of(routing_map, self.config.moe_router_topk)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | LastExpertFirst, Tensor]:
        rows = global_input_tokens
        probs = global_probs
        if self.tp_size > 1:
            splits = self.output_splits_tp.tolist()
            rows, probs = (
                gather_from_sequence_parallel_region(
                    tensor, group=self.tp_group, output_split_sizes=splits
                )
                for tensor in (rows, probs)
            )
        for point in ("before_permutation_2", "before_finish"):
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize(point, self.tokens_per_expert)
        counts = self.tokens_per_expert
        assert counts is not None
        if self.num_local_experts > 1:
            self.received = self._received(rows.device)
            rows = copy_tokens(rows, self.received)
            probs = probs.index_select(0, self.received.entry)
        if self.last_first:
            return rows, LastExpertFirst(counts.flip(0)), probs
        return rows, counts, probs

    def _received(self, device: torch.device) -> TokenCopies:
        """The rows that this rank received, one chunk for each rank and expert, by expert."""
        sizes = self.num_global_tokens_per_local_expert
        order = torch.arange(sizes.numel()).view(sizes.shape).t()
        if self.last_first:
            order = order.flip(0)
        return TokenCopies.of_chunks(sizes.ravel(), order.ravel(), device)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states
        if self.received is not None:
            rows = sum_copies(rows, self.received)
            self.received = None
        if self.tp_size > 1:
            assert self.probs is not None
            rows = reduce_scatter_to_sequence_parallel_region(
                rows.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self.output_splits_tp.tolist(),
            ).to(rows.dtype)
        return rows

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        assert self.copies is not None, "dispatch_preprocess comes first"
        output = sum_copies(permutated_local_input_tokens, self.copies).view(self.hidden_shape)
        # Nothing of a finished pass stays.
        self.copies = None
        self.probs = None
        self.tokens_per_expert = None
        return output


class MoELocalTokenDispatcher(MoEStaticTokenDispatcher):
    """Megatron's dispatcher for experts that are all on this rank: sorts tokens by expert,
    without communication.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        return routing_map.sum(0)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        return tokens_per_expert  # no collective needs sizes on the host

    @property
    def _experts_copy(self) -> bool:
        return self.last_first

    def _copies(self, routing_map: Tensor) -> TokenCopies:
        per_token = self.config.moe_router_topk
        return TokenCopies.of(routing_map, per_token, last_first=self.last_first)

    def token_dispatch(
        self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return permutated_local_input_tokens, permuted_probs

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | LastExpertFirst, Tensor]:
        counts = self.tokens_per_expert
        assert counts is not None
        if self.last_first:
            return global_input_tokens, LastExpertFirst(counts.flip(0), self.copies), global_probs
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


def use_own_dispatchers(model: torch.nn.Module) -> None:
    """Replace Megatron's token dispatchers where each token has as many experts as any other. Their
    scatter-add in the dtype of the activations gives other sums in every pass on a GPU."""
    for module in model.modules():
        if isinstance(module, MoELayer) and _is_static(module.token_dispatcher):
            dispatcher = module.token_dispatcher
            is_local = dispatcher.tp_size == dispatcher.ep_size == 1
            dispatcher.__class__ = MoELocalTokenDispatcher if is_local else MoEStaticTokenDispatcher


def _is_static(dispatcher: MoETokenDispatcher) -> bool:
    """Whether each token has as many experts as any other, and no shared expert runs meanwhile."""
    config = dispatcher.config
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.shared_experts is None
        and config.moe_expert_capacity_factor is None
        and not config.moe_permute_fusion
        and not getattr(config, "moe_router_padding_for_quantization", False)
        # A graph reads upstream's attributes.
        and getattr(config, "cuda_graph_impl", "none") in (None, "none")
    )
