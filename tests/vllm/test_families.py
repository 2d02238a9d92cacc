"""The families that vLLM serves on a CPU, beside the Qwen3-MoE of the other files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from megatron_gspo.config import VLLMConfig
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.served_families import assert_served, two_models
from tests.support.server_clients import engine_on

pytestmark = pytest.mark.slow  # a server for each

# vLLM's attention on a CPU needs heads of 32 dimensions
SIZES = {"dense": {}, "shared": dict(num_attention_heads=1, num_key_value_heads=1), "glm": {}}


@pytest.mark.parametrize("kind", SIZES)
def test_log_probs_are_those_of_transformers(kind: str, vllm_python: str, tmp_path: Path) -> None:
    model, sent = two_models(tmp_path, kind, head_dim=32, **SIZES[kind])
    config = VLLMConfig(num_servers=1, python=vllm_python)
    servers = LocalServers(VLLMLaunch(config, model, "float32", log_dir=str(tmp_path)))
    try:
        servers.start()
        with closing(
            engine_on(
                servers.urls,
                model,
                kind="vllm",
                routes=False,
                weight_transport="distributed",
                health_timeout=60.0,
            )
        ) as engine:
            assert_served(engine, model, sent)
    finally:
        servers.stop()
