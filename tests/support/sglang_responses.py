"""Answers to /generate as SGLang writes them, and the request that they answer."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megatron_gspo.rollout.server_engine.server_api import RequestContext, ServedModel
from tests.support.served_models import served_model

VERSION = "00c0ffee:3"
MODEL = served_model(moe_layers=(True, False, True), k=2, num_experts=8)  # layer 1 is dense


def asked(**changed: Any) -> RequestContext:
    """Five tokens sent, at most four requested; the vocabulary has 96, of which 1 ends a
    response.
    """
    given = dict(
        name="sample 7/2", context_length=5, max_new_tokens=4, model=MODEL, version=VERSION
    )
    return RequestContext(**{**given, **changed})


def route_ids(rows: int, model: ServedModel = MODEL) -> np.ndarray:
    """[rows, layers, k] int32, no two rows equal at first."""
    layers = len(model.shape.moe_layers)
    k = model.shape.experts_per_token
    return (np.arange(rows * layers * k, dtype=np.int32) * 5 % model.shape.num_experts).reshape(
        rows, layers, k
    )


def encoded(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def answer(
    tokens: list[int],
    log_probs: list[float],
    reason: str = "stop",
    context: int = 5,
    start: int = 0,
    **meta: Any,
) -> dict[str, Any]:
    """An answer that is right for `asked(context_length=context, routes_start=start)`."""
    rows = max(context + len(tokens) - 1 - start, 0)
    return {
        "text": "words",
        "output_ids": list(tokens),
        "meta_info": {
            "id": "0",
            "finish_reason": {"type": reason},
            "prompt_tokens": context,
            "weight_version": VERSION,
            "weight_versions": [{"version": VERSION, "start": 0, "end": len(tokens)}],
            "completion_tokens": len(tokens),
            "cached_tokens": 2,
            "output_token_logprobs": [[p, t, None] for t, p in zip(tokens, log_probs, strict=True)],
            "routed_experts": encoded(route_ids(rows)),
            **meta,
        },
    }
