"""The Slurm job script with stand-ins for srun and scontrol (tests/launch/slurm): Slurm itself
isn't here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.config import load_config
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.tools import serve
from tests.bad_input.ranks import run_ranks
from tests.fault_injection.bitwise_diff import first_difference
from tests.support.network_hosts import hosts, why_not
from tests.support.training_runs import base_config, tiny_model
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "qwen3_moe" / "qwen3_235b_a22b_32x8_gspo.yaml"
LIMIT = 240.0  # seconds, on a busy machine


def submit(
    folder: Path, nodes: list[str], arguments: list[str], **settings: Any
) -> subprocess.Popen:
    """The job script as sbatch starts it."""
    environment = {
        **os.environ,
        "PATH": f"{Path(__file__).parent / 'slurm'}:{os.environ['PATH']}",
        "SHIM_CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "LOG_DIR": str(folder / "logs"),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **{name: str(value) for name, value in settings.items()},
    }
    environment.pop("GLOO_SOCKET_IFNAME", None)
    with (folder / "job.txt").open("a") as log:
        command = [str(ROOT / "examples" / "launch" / "slurm.sh"), *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def said(folder: Path, node: str) -> str:
    """What a node's rank wrote."""
    return "".join(
        file.read_text() for file in (folder / "logs" / node).glob("*/attempt_0/0/std*.log")
    )


@pytest.fixture
def nodes():
    """Names of two hosts, the later one first, as Slurm's order can be (node9, node10)."""
    if reason := why_not():
        pytest.skip(f"the Slurm script was not tested over several hosts: {reason}")
    with hosts(2) as two_hosts:
        yield sorted((host.name for host in two_hosts), reverse=True)


@pytest.mark.slow
def test_before_its_time_limit_a_job_saves_and_is_queued_again(nodes, tmp_path):
    """TP 2 over two nodes; the job's second life ends the run, bitwise as one that was left
    alone.
    """
    configs = {}
    for name in ("alone", "run"):
        configs[name] = base_config(
            tiny_model(tmp_path / "model"),
            tmp_path / name,
            parallel={
                "tensor_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "distributed_timeout_minutes": 1.0,
            },
            training={"steps": 8},
            evaluation={"at_start": False},
            checkpoint={"save_interval": 8, "keep": 1},
        )
    assert [rank.code for rank in run_ranks(configs["alone"], 2, tmp_path, limit=LIMIT)] == [0, 0]

    file = tmp_path / "run.yaml"
    run_dir = tmp_path / "run"
    file.write_text(yaml.safe_dump(configs["run"]))
    job = submit(tmp_path, nodes, [str(file)], PROCESSES=1)
    wait_for(lambda: lines(run_dir / "metrics.jsonl") >= 1, LIMIT, alive=lambda: job.poll() is None)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT) == 75, (tmp_path / "job.txt").read_text()[-3000:]
    done = lines(run_dir / "metrics.jsonl")
    assert 1 <= done < 8 and not (run_dir / "summary.json").exists()
    assert calls(tmp_path)[-1] == ["requeue", "17"]

    # Rank 0 is on the first.
    assert ["step 1/8" in said(tmp_path, node) for node in nodes] == [True, False]

    again = submit(tmp_path, nodes, [str(file)], PROCESSES=1, SLURM_RESTART_COUNT=1)
    assert again.wait(LIMIT) == 0, (tmp_path / "job.txt").read_text()[-3000:]
    assert (
        f"resumed from {run_dir}/checkpoints/step_{done:06d}" in (tmp_path / "job.txt").read_text()
    )
    assert [call[0] for call in calls(tmp_path)].count("requeue") == 1
    assert first_difference(run_dir, tmp_path / "alone") == ""


def test_without_sbatch_it_says_so():
    script = ROOT / "examples" / "launch" / "slurm.sh"
    done = subprocess.run(
        [script, "run.yaml"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode != 0 and done.stderr.endswith("start this script with sbatch\n")


def test_a_run_that_fails_is_not_queued_again(tmp_path):
    (tmp_path / "run.yaml").write_text("run_dirr: x\n")
    job = submit(tmp_path, ["here"], [str(tmp_path / "run.yaml")])
    assert job.wait(LIMIT) == 2 and "run_dirr" in (tmp_path / "job.txt").read_text()
    [call] = calls(tmp_path)
    assert call[0] != "requeue"


STOPPER = """#!/bin/bash
trap 'exit 75' USR1
touch "$1"
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_that_is_cancelled_is_not_queued_again(number, requeued, tmp_path):
    """scancel's SIGTERM reaches the job script. A script that stops at once stands for the run."""
    (tmp_path / "static.sh").write_text(STOPPER)
    (tmp_path / "static.sh").chmod(0o755)
    job = submit(tmp_path, ["here"], [str(tmp_path / "ready")], SCRIPTS=tmp_path)
    wait_for((tmp_path / "ready").exists)
    job.send_signal(number)
    assert job.wait(LIMIT) == 75
    assert (["requeue", "17"] in calls(tmp_path)) == requeued
    assert ("resumes when submitted again" in (tmp_path / "job.txt").read_text()) != requeued


def test_the_last_nodes_serve_and_the_run_knows_them(tmp_path):
    """The script passes srun a valid command of the server tool and a valid set of overrides."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(base_config(str(tmp_path), tmp_path / "run")))
    settings = dict(
        SERVER_NODES=1,
        SERVERS_PER_NODE=2,
        SERVER_GPUS=4,
        MODEL="/models/m",
        SGLANG_PYTHON="/s/python",
        SERVER_ARGS="--routed-experts --sglang.mem-fraction-static 0.9",
    )
    nodes = ["node1", "node2", "node3"]
    job = submit(tmp_path, nodes, [str(file), "seed=3"], SHIM_ONLY_RECORD=1, **settings)
    assert job.wait(LIMIT) == 0, (tmp_path / "job.txt").read_text()
    wait_for(lambda: len(calls(tmp_path)) >= 2)  # the job doesn't wait for its servers
    serving, training = sorted(calls(tmp_path), key=lambda call: "serve" not in call)

    step = ["--cpu-bind=none", "--kill-on-bad-exit=0"]
    assert serving[:8] == [*step, "--nodes", "1", "--ntasks", "1", "--nodelist", "node3"]
    words = serving[serving.index("serve") + 1 :]
    assert serving[serving.index("serve") - 2 : serving.index("serve")] == ["-m", "megatron_gspo"]
    ours, theirs = split_server_arguments(words)
    tool = serve._launch(serve._parser().parse_args(ours), theirs)
    servers = tool.config
    assert (tool.model, servers.num_servers, servers.port, servers.python) == (
        "/models/m",
        2,
        31000,
        "/s/python",
    )
    # A slow start is no failure to either.
    assert servers.start_timeout == load_config(SHIPPED).sglang.recovery_timeout
    assert tool.routed_experts
    assert servers.server_args == (
        *("--host", "0.0.0.0", "--tp-size", "4"),
        *("--mem-fraction-static", "0.9"),
    )

    assert training[:8] == [*step, "--nodes", "2", "--ntasks", "2", "--nodelist", "node1,node2"]
    assert training[8:10] == ["bash", "-c"] and "NODE_RANK=$SLURM_NODEID" in training[10]
    assert training[12].endswith("/examples/launch/static.sh") and training[13] == str(file)
    config = load_config(file, training[14:])
    assert config.sglang.urls == ("http://node3:31000", "http://node3:31001")
    assert (config.sglang.master_address, config.model.path, config.seed) == (
        "node1",
        "/models/m",
        3,
    )
    key = Path(config.sglang.api_key_file)
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_text().strip()) == 48
    assert servers.api_key_file == str(key)
