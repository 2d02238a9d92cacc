"""Runs of agents on a real server, whose histories branch."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.servers.server_processes import LocalServers
from tests.train.test_agents import BRANCHING
from tests.vllm.test_training import AGREEMENT, run


def test_runs_with_branches(vllm_server: LocalServers, vllm_model: str, tmp_path: Path) -> None:
    """Log-probs of every generated token are those of the trainer."""
    steps = run(
        vllm_model,
        tmp_path / "run",
        {"urls": vllm_server.urls},
        agents=BRANCHING,
        rollout={"max_response_length": 6},
        training={"steps": 2, "max_tokens_per_micro_batch": 640},
    )
    assert len(steps) == 2
    for record in steps:
        assert record["agents/rows"] == 48 and record["agents/calls"] == 64
        assert record["mismatch/abs_diff_max"] < AGREEMENT
