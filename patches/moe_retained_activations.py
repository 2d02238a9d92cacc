"""Release what a MoE dispatcher keeps of a finished forward pass.

Upstream: megatron-core 0.16.1 to 0.19.2, ``transformer/moe/token_dispatcher.py``. Dispatchers keep
the routing probabilities and the permutation of the last pass as attributes. The probabilities'
graph ends at the layer's input: under full recomputation that is the detached input of the
recomputed layer, which stays alive after the backward pass together with its gradient, once per
layer. So the peak grows by two residual streams per layer (30B-A3B, 48 layers, 36,864 tokens, TP 2,
EP 8: 12.0 GiB of activations instead of 8.4). Reported in NVIDIA/Megatron-LM#3221; #5227 corrects
it for DeepEP.

Delete when: upstream releases them after combining.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_gspo.patches.mark import replace

DISPATCHERS = (
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
)
# Set again by each pass before they are read; combine_postprocess is the last to read any of them.
PASS_STATE = (
    "probs",
    "local_probs",
    "token_probs",
    "dispatched_probs",
    "routing_map",
    "local_map",
    "dispatched_routing_map",
    "token_indices",
    "dispatched_indices",
    "reversed_local_input_permutation_mapping",
    "reversed_mapping_for_combine",
)


def release(dispatcher: Any) -> None:
    """Set the tensors that a dispatcher, or its communication manager, keeps of a pass to None."""
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name in PASS_STATE:
            if getattr(holder, name, None) is not None:
                setattr(holder, name, None)


def _releasing(original: Any) -> Any:
    @functools.wraps(original)
    def combine_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        release(self)
        return output

    return combine_postprocess


def apply() -> None:
    """Let every dispatcher release its tensors at the end of ``combine_postprocess``."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    for name in DISPATCHERS:
        if not hasattr(token_dispatcher, name):
            raise ImportError(
                f"cannot patch token_dispatcher.{name}: no such class; this upstream version is"
                " unknown"
            )
        replace(getattr(token_dispatcher, name), "combine_postprocess", _releasing)
