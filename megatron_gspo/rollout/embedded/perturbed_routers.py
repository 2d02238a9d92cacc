"""A perturbation of the routers of a Transformers model (`routing_replay.perturbation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from megatron_gspo.rollout.embedded.model_modules import modules_of
from megatron_gspo.routing_replay.perturbation import PerturbedPass, RoutedTokens

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""Logits [t, experts], weights [t, k] and ids [t, k] of the chosen experts."""

_ALWAYS_NORMALISED = ("GptOssTopKRouter", "Qwen3_5MoeTopKRouter")  # without `norm_topk_prob`


class _TopKRouter(Protocol):
    top_k: int


class PerturbedRouters:
    """Makes the softmax routers of `model` choose experts by perturbed logits. `remove` undoes it.

    Raises ValueError (one line) for a model without such routers.
    """

    def __init__(self, model: nn.Module) -> None:
        missing = "softmax router that chooses experts: leave routing.perturbation out"
        routers = modules_of(model, _is_softmax_router, missing)
        self._pass: PerturbedPass | None = None
        self._tokens: RoutedTokens | None = None
        self._hooks = [
            router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(routers)
        ]

    def start(self, perturbed: PerturbedPass) -> None:
        """Begin another pass."""
        self._pass = perturbed
        self._tokens = None

    def set_tokens(self, sequences: Tensor, segments: Tensor, positions: Tensor) -> None:
        """The tokens [t] of the next forward pass: int64 [n, 2] (prompt_index, sample_index) of the
        sequences, and int64 [t] the sequence of each token and its position."""
        self._tokens = RoutedTokens.of(sequences.to(segments.device), segments, positions)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[..., RouterOutput]:
        def reroute(
            router: _TopKRouter, args: tuple[Tensor, ...], output: RouterOutput
        ) -> RouterOutput:
            assert self._pass is not None and self._tokens is not None
            logits, weights, _ = output
            chosen_by, weighed_by = self._pass(logits, layer, self._tokens)
            if chosen_by is logits and weighed_by is logits:
                return output
            ids = chosen_by.topk(router.top_k, dim=-1).indices
            chosen = weighed_by.to(chosen_by.dtype).softmax(-1).gather(1, ids)
            if getattr(router, "norm_topk_prob", True):
                chosen = chosen / chosen.sum(-1, keepdim=True)
            return logits, chosen.to(weights.dtype), ids

        return reroute


def _is_softmax_router(module: nn.Module) -> bool:
    """Whether it returns (logits, weights, ids) of a softmax: over all experts, as in the Qwen
    families, or over the chosen ones, as in gpt-oss, which is the same normalised."""
    name = type(module).__name__
    if hasattr(module, "e_score_correction_bias"):
        return False
    if name in _ALWAYS_NORMALISED:
        return True
    return name.endswith("TopKRouter") and hasattr(module, "norm_topk_prob")
