"""Whole runs on a real server. `mismatch/abs_diff_max` compares its log-probs of every trained
token with those of the policy that the weights came from: an update that is missed, late or half
done shows there at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.train import train
from tests.sglang.conftest import StartServers
from tests.support.distributed import run_distributed
from tests.support.ties import FLIPS
from tests.support.training_runs import base_config, check_ledger, ledger, records

AGREEMENT = 2e-5  # nats
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def adapter_url(start_servers: StartServers) -> str:
    """A server that takes adapters of the attention: the experts' kernels with adapters need a
    GPU.
    """
    args = SGLangLaunch.adapter_args(4, ADAPTED, ["--device", "cpu"])
    return start_servers(count=1, server_args=tuple(args)).urls[0]


def run(
    model: str,
    run_dir: Path,
    urls: list[str],
    processes: int = 1,
    nodes: int = 1,
    **sections: Any,
) -> list[dict]:
    """nodes: what the processes take themselves to be spread over."""
    rollout = {"engine": "sglang", **sections.pop("rollout", {})}
    sglang = {"urls": urls, "health_interval": 0.5, **sections.pop("sglang", {})}
    config = base_config(model, run_dir, rollout=rollout, sglang=sglang, **sections)
    run_distributed(train_here, processes, config, nodes)
    return [record for record in records(run_dir) if record["step"] > 0]


def train_here(rank: int, world_size: int, config: dict[str, Any], nodes: int) -> None:
    # As torchrun sets them.
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size // nodes)}
    train(Config.from_dict(config))


again = pytest.mark.slow  # test_weights.py has each way of the weights, other runs each loop


@pytest.mark.parametrize(
    "route",
    [pytest.param("disk", marks=again), pytest.param("tensor", marks=again), "distributed"],
)
def test_each_way_of_the_weights(
    sglang_servers: LocalServers, sglang_model: str, tmp_path: Path, route: str
) -> None:
    steps = run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        sglang={"weight_transport": route, "log_prob_check_interval": 1},
        routing={"replay": "r3"},
        training={"steps": 4},
    )
    assert len(steps) == 4
    for record in steps:
        assert (
            record["mismatch/abs_diff_max"] < AGREEMENT
            and record["log_prob_check/abs_diff_max"] < AGREEMENT
        )
        assert record["routing/rollout_flip_rate"] < FLIPS and record["staleness/max"] == 0.0
        assert record["rollout/servers"] == 2.0
        assert record["ratio_token/max"] > 1.001, "the updates must move what is compared"
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=0)


@pytest.mark.parametrize("route", ["disk", "tensor"])
def test_adapters_alone_are_sent_and_added_to_the_base(
    adapter_url: str, sglang_model: str, tmp_path: Path, route: str
) -> None:
    lora = {"rank": 4, "alpha": 32.0, "targets": ADAPTED, "weight_updates": "adapters"}
    steps = run(
        sglang_model,
        tmp_path / "run",
        [adapter_url],
        processes=2,
        parallel={"tensor_model_parallel_size": 2},
        sglang={"weight_transport": route, "log_prob_check_interval": 1},
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
    folders = [
        path.name for folder in (tmp_path / "run").glob("weights/*") for path in folder.iterdir()
    ]
    assert folders == (["adapters"] if route == "disk" else [])


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("expert_model_parallel_size", 1),
        pytest.param("pipeline_model_parallel_size", 1, marks=again),
        ("pipeline_model_parallel_size", 2),
    ],
)
def test_two_ranks_hand_over_their_own_tensors(
    sglang_servers: LocalServers, sglang_model: str, tmp_path: Path, layout: str, nodes: int
) -> None:
    """Half of the experts, or of the layers, are on each rank; the servers get handles to the
    memory of both, or where the second rank is another node, of the first rank, which then relays
    the second's."""
    steps = run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        processes=2,
        nodes=nodes,
        parallel={layout: 2},
        sglang={"weight_transport": "ipc", "log_prob_check_interval": 1},
        training={"steps": 3},
    )
    assert len(steps) == 3
    for record in steps:
        assert (
            record["mismatch/abs_diff_max"] < AGREEMENT
            and record["log_prob_check/abs_diff_max"] < AGREEMENT
        )
        assert record["rollout/servers"] == 2.0 and record["ratio_token/max"] > 1.001


def test_one_step_ahead_on_two_ranks(
    sglang_servers: LocalServers, sglang_model: str, tmp_path: Path
) -> None:
    steps = run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        2,
        parallel={"expert_model_parallel_size": 2},
        rollout={"max_staleness": 1, "overlap": True},
        training={"steps": 5},
    )
    assert [record["staleness/max"] for record in steps] == [0.0] + [1.0] * 4
    assert steps[0]["mismatch/abs_diff_max"] < AGREEMENT < steps[1]["mismatch/abs_diff_max"]
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=1)


def test_unfinished_responses_go_on_after_the_update(
    sglang_servers: LocalServers, sglang_model: str, tmp_path: Path
) -> None:
    steps = run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        routing={"replay": "r3"},
        rollout={"max_staleness": 2, "oversampling": 3.0, "max_response_length": 200},
        training={"steps": 6, "max_tokens_per_micro_batch": 400},
        evaluation={"at_start": False, "at_end": False},
    )
    assert sum(record["rollout/continued"] for record in steps) > 0
    assert all(record["rollout/discarded_tokens"] == 0 for record in steps)
    assert 0 < max(record["staleness/max"] for record in steps) <= 2
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=2)


def test_a_resumed_run_begins_with_what_was_pending(
    sglang_servers: LocalServers, sglang_model: str, tmp_path: Path
) -> None:
    ahead = {"max_staleness": 1, "overlap": True}
    run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        rollout=ahead,
        training={"steps": 2},
        checkpoint={"save_interval": 2},
    )
    pending = ledger(tmp_path / "run")[-1]["pending"]
    assert len(pending) == 4
    steps = run(
        sglang_model,
        tmp_path / "run",
        sglang_servers.urls,
        rollout=ahead,
        training={"steps": 4},
        checkpoint={"save_interval": 2},
    )
    assert {row[0] for row in ledger(tmp_path / "run")[2]["samples"]} == set(pending)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    check_ledger(tmp_path / "run", batch=4, n=4, staleness=1)
