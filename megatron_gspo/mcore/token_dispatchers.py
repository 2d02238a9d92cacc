"""Token dispatchers for experts: Megatron's, with a permutation of known size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor

from megatron_gspo.mcore.token_copies import TokenCopies, copy_tokens, sum_copies


@dataclass(frozen=True)
class LastExpertFirst:
    """How many rows each of this rank's experts has, [experts], where the last expert's rows come
    first. In this order the experts' weights are in Megatron's parameter buffer.
    """

    counts: Tensor


class MoEStaticTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with a permutation of known size: each token has ``moe_router_topk``
    experts.

    Megatron's own selects by a mask, for which the host waits twice per pass, and adds up a token's
    experts in the dtype of the activations.

    last_first: it gives the experts a `LastExpertFirst` in place of the number of their tokens.
    """

    last_first: bool = False
    copies: TokenCopies | None = None  # between dispatch and combine
    probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None

    def give_last_first(self) -> None:
        """From now on sort the rows of this rank's experts from the last to the first."""
        self.last_first = True
        received = self.sort_input_by_local_experts.view(self.num_local_experts, -1)
        self.sort_input_by_local_experts = received.flip(0).ravel()
        returned = self.restore_output_by_local_experts.view(-1, self.num_local_experts)
        self.restore_output_by_local_experts = returned.flip(1).ravel()

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.probs = probs.detach()  # combine_preprocess reads its dtype
        self.hidden_shape = hidden_states.shape
        self.copies = self._copies(routing_map)
        rows = copy_tokens(hidden_states.reshape(-1, hidden_states.shape[-1]), self.copies)
        return rows, probs.reshape(-1).index_select(0, self.copies.entry)

    def _copies(self, routing_map: Tensor) -> TokenCopies:
        return TokenCopies.of(routing_map, self.config.moe_router_topk)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | LastExpertFirst, Tensor]:
        rows, counts, probs = super().dispatch_postprocess(global_input_tokens, global_probs)
        if not self.last_first:
            return rows, counts, probs
        if self.num_local_experts > 1:
            # The sizes of what combine_preprocess sends back.
            sizes = self.num_global_tokens_per_local_expert
            self.num_global_tokens_per_local_expert = sizes.flip(1)
        return rows, LastExpertFirst(counts.flip(0)), probs

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

    def _copies(self, routing_map: Tensor) -> TokenCopies:
        per_token = self.config.moe_router_topk
        return TokenCopies.of(routing_map, per_token, last_first=self.last_first)

    def token_dispatch(
        self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return permutated_local_input_tokens, permuted_probs

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | LastExpertFirst | None, Tensor]:
        counts: Tensor | LastExpertFirst | None = self.tokens_per_expert
        if self.last_first:
            counts = LastExpertFirst(self.tokens_per_expert.flip(0))
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
