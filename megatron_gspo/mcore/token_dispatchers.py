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


NOT_CHOSEN = -1.0
"""In the place of a token's probability for an expert that it doesn't go to; no probability is
negative."""


class MoEStaticTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with permutations of known size: each token has ``moe_router_topk``
    experts.

    Megatron's own selects by a mask, for which the host waits twice per pass, sends a token once for
    each expert, and adds up a token's experts in the dtype of the activations. What a rank receives
    it cuts into chunks, one for each expert and rank, and joins them again.

    Here a token goes to a rank once, with its probabilities for that rank's experts. There it is
    copied for each of them, sorted by expert, and the sum of their outputs goes back.

    last_first: it gives the experts a `LastExpertFirst` in place of the number of their tokens.
    """

    last_first: bool = False
    num_out_tokens: None = None  # the base class would copy them to the host
    num_global_tokens_per_local_expert: None = None
    # Between dispatch and combine:
    ranks: Tensor | None = None  # [tokens, ep], where a token has an expert on a rank
    copies: TokenCopies | None = None
    received: TokenCopies | None = None
    probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Tokens of each local expert; sets the tokens that go from rank to rank."""
        self.ranks = routing_map.view(-1, self.ep_size, self.num_local_experts).any(2)
        counts = torch.cat([routing_map.sum(0), self.ranks.sum(0)])
        of_all = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
        of_all = of_all.view(self.ep_size, self.tp_size, -1).transpose(0, 1)
        first = self.local_expert_indices[0]
        received = of_all[:, :, self.num_experts + first // self.num_local_experts]
        self.input_splits = counts[self.num_experts :]
        self.output_splits = received[self.tp_rank].clone()  # the counts of all ranks don't stay
        self.output_splits_tp = received.sum(1)
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return of_all[:, :, first : first + self.num_local_experts].sum((0, 1))

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.probs = probs.detach()  # combine_preprocess reads its dtype
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self._to_send(tokens, routing_map, probs)

    def _to_send(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, h], and each row's probability for the experts of its rank, [n, experts]."""
        assert self.ranks is not None and self.input_splits is not None
        most = min(self.config.moe_router_topk, self.ep_size)
        self.copies = TokenCopies.of(self.ranks, int(self.input_splits.sum()), most=most)
        self.ranks = None
        chosen = probs.masked_fill(~routing_map, NOT_CHOSEN).view(-1, self.num_local_experts)
        return copy_tokens(tokens, self.copies), chosen.index_select(0, self.copies.entry)

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
        counts = self.tokens_per_expert
        assert counts is not None
        if self.num_local_experts > 1:
            self.received = TokenCopies.of(
                probs.detach() != NOT_CHOSEN,
                int(counts.sum()),
                most=min(self.config.moe_router_topk, self.num_local_experts),
                last_first=self.last_first,
            )
            rows = copy_tokens(rows, self.received)
            probs = probs.reshape(-1).index_select(0, self.received.entry)
        else:
            probs = probs.squeeze(1)
        if self.last_first:
            return rows, LastExpertFirst(counts.flip(0)), probs
        return rows, counts, probs

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

    def _to_send(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the experts, and the probability of each; with ``last_first`` the tokens, which
        the experts copy."""
        most = self.config.moe_router_topk
        self.copies = TokenCopies.of(
            routing_map, len(tokens) * most, most=most, last_first=self.last_first
        )
        rows = tokens if self.last_first else copy_tokens(tokens, self.copies)
        return rows, probs.reshape(-1).index_select(0, self.copies.entry)

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
