"""What a request context derives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.rollout.server_engine.server_api import RequestContext
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from tests.support.served_models import served_model


@pytest.mark.parametrize(("kind", "field"), [("sglang", "lora_path"), ("vllm", "model")])
def test_every_request_names_the_adapters(kind, field):
    api = SERVER_KINDS[kind].api
    for adapters in ("", "policy"):
        context = RequestContext("r", 2, 4, replace(served_model(), adapters=adapters))
        requests = [
            api.generate_request([2, 3], context, SamplingParams(), 0),
            api.prefill_request([2, 3], context),
            api.score_request([2, 3], context),
        ]
        assert [request.body.get(field, "") for request in requests] == [adapters] * 3
