"""The hook at each router through which the routes of a micro-batch are recorded or replayed.

It takes the place of Megatron's ``RouterReplay``, which keeps routes in a process-wide list of
routers and pops those of the backward pass from a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_gspo.mcore.routing_replay.micro_batch_routes import MicroBatchRoutes, RoutingError

# Options of TransformerConfig with which a router doesn't call the hook, or drops replayed experts.
_BYPASSES: dict[str, Callable[[Any], bool]] = {
    "moe_router_fusion": bool,
    "moe_router_load_balancing_type": lambda types: bool(
        {"sinkhorn", "quantile_balancing"} & set(_as_list(types))
    ),
    "moe_expert_capacity_factor": lambda factor: factor is not None,
    "moe_router_force_load_balancing": bool,
    "moe_router_force_biased": lambda bias: bias is not None,
    "moe_input_jitter_eps": lambda eps: eps is not None,
    "recompute_modules": lambda modules: "moe" in (modules or ()),
    "cuda_graph_impl": lambda name: name not in (None, "none"),  # a replayed graph runs no Python
    "cuda_graph_scope": lambda scope: any("moe" in str(module) for module in _as_list(scope)),
}


class RouterHook:
    """A router's ``router_replay``: it routes with the ``MicroBatchRoutes`` of the current
    micro-batch, if it has one.

    layer: position of the router among the MoE layers of the whole model.
    """

    def __init__(self, layer: int, config: TransformerConfig, router: TopKRouter) -> None:
        self.layer = layer
        self._router = router
        self._is_sigmoid = config.moe_router_score_function == "sigmoid"
        self.layer_number: int | None = None  # megatron-core 0.19 sets it
        self._are_logits = (
            config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax
        )
        self._routes: MicroBatchRoutes | None = None

    def enter(
        self, layer: TransformerLayer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Forward pre-hook of the transformer layer: takes the routes from the packed-sequence
        parameters.
        """
        self._routes = getattr(kwargs.get("packed_seq_params"), "routes", None)

    def leave(self, layer: TransformerLayer, args: tuple[object, ...], output: object) -> None:
        """Forward hook of the transformer layer.

        Until here a second call of the router is counted and then refused.
        """
        self._routes = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What Megatron's routers call in place of their top-k; ``scores`` are logits or
        probabilities ``[t, E]``.
        """
        assert default_compute_topk is not None

        def live(values: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(values, topk, num_groups, group_topk)

        routes = self._routes
        if routes is None:
            return live(scores)
        return routes.route(
            self.layer, scores, live, are_logits=self._are_logits, shares=self._shares
        )

    def _shares(self, scores: Tensor) -> Tensor:
        """The router's distribution over all experts, [t, E], of which the entropy is taken."""
        if self._is_sigmoid:
            bias = self._router.expert_bias  # part of the scores that experts are chosen by
            scores = scores if bias is None else scores - bias
            return scores / scores.sum(-1, keepdim=True)
        return scores.softmax(-1) if self._are_logits else scores


def attach_router_hooks(chunk: GPTModel) -> None:
    """Put a hook at every router of a model chunk.

    A hook does nothing until a pass has routes (`router_hooks`).
    """
    for number, layer in zip(moe_layer_numbers(chunk), moe_layers(chunk), strict=True):
        router = layer.mlp.router
        hook = RouterHook(number, chunk.config, router)
        router.router_replay = hook
        layer.register_forward_pre_hook(hook.enter, with_kwargs=True)
        layer.register_forward_hook(hook.leave)


def router_hooks(chunk: GPTModel) -> list[RouterHook]:
    """The hooks of a model chunk, in the order of its MoE layers.

    Raises ``RoutingError`` where a router has none, or an option of the model's config makes it
    choose without calling its hook.
    """
    refuse_bypasses(chunk.config)
    hooks = [layer.mlp.router.router_replay for layer in moe_layers(chunk)]
    if not all(isinstance(hook, RouterHook) for hook in hooks):
        raise RoutingError(
            "a router of the model has no hook for routing replay; call attach_router_hooks first"
        )
    return hooks


def moe_layers(chunk: GPTModel) -> list[TransformerLayer]:
    """The transformer layers with experts of a model chunk, in order."""
    return [layer for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]


def moe_layer_numbers(chunk: GPTModel) -> list[int]:
    """Positions of a model chunk's MoE layers among those of the whole model."""
    before = _moe_layers_before(chunk)
    return list(range(before, before + len(moe_layers(chunk))))


def refuse_bypasses(config: TransformerConfig) -> None:
    """Raise ``RoutingError`` for a config whose routers choose, or drop tokens, without the hook."""
    for key, bypasses in _BYPASSES.items():
        value = getattr(config, key, None)
        if bypasses(value):
            raise RoutingError(f"{key}={value} bypasses routing replay; leave it at its default")


def _moe_layers_before(chunk: GPTModel) -> int:
    """MoE layers of the whole model before the first layer of this chunk."""
    frequency = chunk.config.moe_layer_freq
    first = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    if isinstance(frequency, int):
        return sum(layer % frequency == 0 for layer in range(first))
    return sum(frequency[:first])


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]
