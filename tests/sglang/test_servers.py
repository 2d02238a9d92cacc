"""Local servers: they serve, come back after SIGKILL, and leave nothing behind."""

from __future__ import annotations

import json
import urllib.request


def generate(url: str, ids: list[int], count: int = 4) -> dict:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}, "return_logprob": True,
            "return_routed_experts": True}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/generate", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_serves(sglang_url):
    answer = generate(sglang_url, [5, 6, 7])
    assert len(answer["output_ids"]) == 4
    assert all(log_prob <= 0 for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"])
    assert answer["meta_info"]["routed_experts"]
