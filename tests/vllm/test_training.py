"""Whole runs on a real server. `mismatch/abs_diff_max` compares its log-probs of every trained
token with those of the policy that the weights came from: an update that is missed, late or half
done shows there at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.train import train
from tests.support.distributed import run_distributed
from tests.support.real_servers import save_character_model
from tests.support.training_runs import base_config, records
from tests.vllm.conftest import StartServers

AGREEMENT = 2e-5  # nats


def run(
    model: str, run_dir: Path, vllm: dict[str, Any], processes: int = 1, **sections: dict[str, Any]
) -> list[dict]:
    rollout = {"engine": "vllm", **sections.pop("rollout", {})}
    sections["data"] = {"max_prompt_length": 64}  # of the character tokenizer
    config = base_config(
        model, run_dir, rollout=rollout, vllm={"health_interval": 0.5, **vllm}, **sections
    )
    run_distributed(train_here, processes, config, timeout=400.0)
    return [record for record in records(run_dir) if record["step"] > 0]


def train_here(rank: int, world_size: int, config: dict[str, Any]) -> None:
    train(Config.from_dict(config))


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_r2_with_each_way_of_the_weights(
    vllm_server: LocalServers, vllm_model: str, tmp_path: Path, transport: str
) -> None:
    """Log-probs of both engines agree at every step; the routes are the training engine's."""
    servers = {
        "urls": vllm_server.urls,
        "weight_transport": transport,
        "log_prob_check_interval": 1,
    }
    steps = run(
        vllm_model, tmp_path / "run", servers, routing={"replay": "r2"}, training={"steps": 4}
    )
    assert len(steps) == 4
    for record in steps:
        assert (
            record["mismatch/abs_diff_max"] < AGREEMENT
            and record["log_prob_check/abs_diff_max"] < AGREEMENT
        )
        assert record["staleness/max"] == 0.0 and record["rollout/servers"] == 1.0
        assert record["ratio_token/max"] > 1.001, "the updates must move what is compared"


def test_two_ranks_send_their_own_experts_one_step_ahead(
    vllm_server: LocalServers, vllm_model: str, tmp_path: Path
) -> None:
    steps = run(
        vllm_model,
        tmp_path / "run",
        {"urls": vllm_server.urls, "log_prob_check_interval": 1},
        2,
        parallel={"expert_model_parallel_size": 2},
        rollout={"max_staleness": 1, "overlap": True},
    )
    assert [record["staleness/max"] for record in steps] == [0.0, 1.0, 1.0]
    assert all(record["log_prob_check/abs_diff_max"] < AGREEMENT for record in steps)
    assert steps[0]["mismatch/abs_diff_max"] < AGREEMENT < steps[1]["mismatch/abs_diff_max"]


def test_adapters_alone_are_sent_and_added_to_the_base(
    start_servers: StartServers, tmp_path: Path
) -> None:
    """Of all linear layers of a dense model: adapters of experts need a GPU."""
    model = save_character_model(tmp_path / "model", "dense", head_dim=32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    server = start_servers(
        count=1, model=model, server_args=VLLMLaunch.adapter_args(4, targets, [])
    )
    lora = {"rank": 4, "alpha": 32.0, "targets": targets, "weight_updates": "adapters"}
    servers = {"urls": server.urls, "weight_transport": "disk", "log_prob_check_interval": 1}
    steps = run(
        model,
        tmp_path / "run",
        servers,
        2,
        parallel={"tensor_model_parallel_size": 2},
        lora=lora,
        optimizer={"lr": 2e-2},
        training={"steps": 4},
    )
    assert len(steps) == 4
    for record in steps:
        assert (
            record["mismatch/abs_diff_max"] < AGREEMENT
            and record["log_prob_check/abs_diff_max"] < AGREEMENT
        )
        assert record["ratio_token/max"] > 1.001, "the updates must move what is compared"
