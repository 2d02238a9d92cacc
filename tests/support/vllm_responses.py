"""Answers to /inference/v1/generate as vLLM writes them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

VERSION = "00c0ffee:3"


def npy(ids: np.ndarray) -> str:
    """A .npy file in base64."""
    buffer = io.BytesIO()
    np.save(buffer, ids)
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_answer(
    tokens: list[int], log_probs: list[float], reason: str = "stop", **choice: Any
) -> dict[str, Any]:
    """An answer without routes; `choice` replaces fields."""
    content = [
        {
            "token_id": t,
            "logprob": p,
            "rank": 1,
            "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}],
        }
        for t, p in zip(tokens, log_probs, strict=True)
    ]
    spans = [{"version": VERSION, "start": 0, "end": len(tokens)}] if tokens else []
    given = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": len(tokens),
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    return {"request_id": "0", "usage": usage, "prompt_logprobs": None, "choices": [given | choice]}
