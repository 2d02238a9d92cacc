"""A Slurm job of two nodes, one that trains and one that serves: its script starts both and tells
the run where the servers are. The nodes are network namespaces, srun and scontrol stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from tests.launch.test_slurm import submit
from tests.sglang.test_training import AGREEMENT
from tests.support.network_hosts import hosts, why_not
from tests.support.training_runs import WORD, base_config, records


def test_one_node_trains_and_one_serves(sglang_python, tmp_path):
    if reason := why_not():
        pytest.skip(f"a job with servers on a node of their own was not tested: {reason}")
    model = tmp_path / "model"
    run_dir = tmp_path / "run"
    file = tmp_path / "run.yaml"
    write_tiny_model(
        model, TinyModel(hidden=32, layers=2, experts=4, expert_width=16), words=[WORD]
    )
    file.write_text(yaml.safe_dump(base_config(str(model), run_dir, training={"steps": 3})))
    servers = dict(
        SERVER_NODES=1,
        SERVERS_PER_NODE=1,
        SERVER_GPUS=1,
        MODEL=model,
        SGLANG_PYTHON=sglang_python,
        SERVER_ARGS="--dtype float32",
    )
    with hosts(2) as nodes:
        names = [node.name for node in nodes]
        job = submit(
            tmp_path, names, [str(file), "sglang.health_interval=0.5"], PROCESSES=1, **servers
        )
        assert job.wait(240) == 0, (tmp_path / "job.txt").read_text()[-3000:] + log(tmp_path)
    steps = [record for record in records(run_dir) if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["rollout/servers"] == 1 for record in steps)
    assert max(record["mismatch/abs_diff_max"] for record in steps) < AGREEMENT
    assert (tmp_path / "logs" / "servers" / names[1] / "server_0.log").is_file()


def log(folder: Path) -> str:
    return "".join(file.read_text()[-2000:] for file in folder.glob("logs/servers/*/*.log"))
