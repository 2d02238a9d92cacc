"""vLLM's chat completions as a judge."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_judge import assert_it_judges
from tests.vllm.test_faults_in_runs import MODULE


def test_it_judges(vllm_server: LocalServers, vllm_model: str, tmp_path: Path) -> None:
    assert_it_judges(vllm_server.urls[0], vllm_model, MODULE, tmp_path)
