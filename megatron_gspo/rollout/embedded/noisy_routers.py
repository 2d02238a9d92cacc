"""Noise in the routers of a Transformers model, for stress tests
(`routing_replay.router_noise`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_gspo.rollout.embedded.model_modules import modules_of
from megatron_gspo.routing_replay.router_noise import RouterNoise, perturb, token_seeds

_ALWAYS_NORMALISED = ("GptOssTopKRouter", "Qwen3_5MoeTopKRouter")  # without `norm_topk_prob`


class NoisyRouters:
    """Makes the softmax routers of `model` choose experts by perturbed logits. `remove` undoes it.

    Raises ValueError (one line) for a model without such routers.
    """

    def __init__(self, model: nn.Module) -> None:
        missing = "softmax router that chooses experts: leave router_noise off"
        routers = modules_of(model, _is_softmax_router, missing)
        self._noise: RouterNoise | None = None
        self._seeds: Tensor | None = None
        self._hooks = [
            router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(routers)
        ]

    def start(self, noise: RouterNoise) -> None:
        """Begin a pass with other noise."""
        self._noise = noise
        self._seeds = None

    def set_tokens(self, sequences: Tensor, segments: Tensor, positions: Tensor) -> None:
        """The tokens [t] of the next forward pass: int64 [n, 2] (prompt_index, sample_index) of the
        sequences, and int64 [t] the sequence of each token and its position."""
        assert self._noise is not None
        self._seeds = token_seeds(self._noise.seed, sequences, segments, positions)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        def reroute(
            router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
        ) -> Any:
            assert self._noise is not None and self._seeds is not None
            logits, weights, _ = output
            perturbed = perturb(logits, self._seeds, layer, self._noise.strength)
            ids = perturbed.topk(router.top_k, dim=-1).indices
            values = perturbed if self._noise.perturb_weights else logits.to(perturbed.dtype)
            chosen = values.softmax(-1).gather(1, ids)
            if getattr(router, "norm_topk_prob", True):
                chosen = chosen / chosen.sum(-1, keepdim=True)
            return logits, chosen.to(weights.dtype), ids

        return reroute


def _is_softmax_router(module: Any) -> bool:
    """Whether it returns (logits, weights, ids) of a softmax: over all experts, as in the Qwen
    families, or over the chosen ones, as in gpt-oss, which is the same normalised."""
    name = type(module).__name__
    if hasattr(module, "e_score_correction_bias"):
        return False
    if name in _ALWAYS_NORMALISED:
        return True
    return name.endswith("TopKRouter") and hasattr(module, "norm_topk_prob")
