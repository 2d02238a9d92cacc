"""The families that SGLang serves on a CPU, beside the Qwen3-MoE of the other files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from megatron_gspo.config import SGLangConfig
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.served_families import assert_served, two_models
from tests.support.server_clients import engine_on

pytestmark = pytest.mark.slow  # a server for each

HAS_EXPERTS = {"dense": False, "glm": True}


@pytest.mark.parametrize("kind", HAS_EXPERTS)
def test_log_probs_and_routes_are_those_of_transformers(
    kind: str, sglang_python: str, tmp_path: Path
) -> None:
    model, sent = two_models(tmp_path, kind)
    config = SGLangConfig(num_servers=1, python=sglang_python, start_timeout=300.0)
    servers = LocalServers(SGLangLaunch(config, model, "float32", HAS_EXPERTS[kind], str(tmp_path)))
    try:
        servers.start()
        with closing(engine_on(servers.urls, model, routes=HAS_EXPERTS[kind])) as engine:
            assert_served(engine, model, sent)
    finally:
        servers.stop()
