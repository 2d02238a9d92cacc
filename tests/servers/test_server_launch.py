"""What the launch of every engine shares: checks, options, GPUs, the API key, the environment.

No server is started here.
"""

from __future__ import annotations

import sys

import pytest

from megatron_gspo.config import ServerConfig, SGLangConfig
from megatron_gspo.errors import InputError
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_launch import (
    check_model,
    first_server_gpu,
    package_version,
    read_api_key,
    server_environment,
)


def test_the_key_is_the_first_line_of_its_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(" k-secret \nmore\n")
    assert read_api_key(ServerConfig(api_key_file=str(file))) == "k-secret"
    assert read_api_key(ServerConfig()) is None


def test_the_environment_of_a_worker_is_not_a_servers():
    base = {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ROLE_WORLD_SIZE": "8",
        "MY_RANK": "kept",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": "/trainer",
    }
    kept = {"PATH": "/bin", "MY_RANK": "kept", "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONSAFEPATH": "1"}
    assert server_environment("/other", base) == kept
    assert server_environment(sys.executable, base) == {**kept, "PYTHONPATH": "/trainer"}


def test_an_interpreter_without_sglang_and_one_that_is_absent():
    with pytest.raises(InputError, match=r"sglang.python=.*sglang is not installed there"):
        package_version(sys.executable, ("sglang",), "sglang")
    with pytest.raises(InputError, match=r"sglang.python=/no/python: .*No such file"):
        package_version("/no/python", ("sglang",), "sglang")


def test_a_path_without_a_model_is_named_and_a_hub_name_is_left_to_sglang(tmp_path):
    with pytest.raises(InputError, match=f"model path {tmp_path}: no config.json there"):
        check_model(str(tmp_path), "sglang")
    with pytest.raises(InputError, match="model path /no/where"):
        check_model("/no/where", "sglang")
    check_model("Qwen/Qwen3-30B-A3B", "sglang")
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path), "sglang")


def first(args=(), servers=1, *, trainer=2, visible=8, colocated=False) -> int:
    config = SGLangConfig(num_servers=servers, server_args=args, colocated=colocated)
    return first_server_gpu(
        config,
        SGLangLaunch.gpus_per_server(args),
        trainer_gpus=trainer,
        visible_gpus=visible,
        option_name=SGLangLaunch.gpu_option,
    )


def test_servers_get_gpus_that_no_rank_uses():
    assert first() == 2
    assert first(servers=6) == 2
    assert first(("--tp", "3"), servers=2) == 2
    assert first(("--base-gpu-id", "5")) == 5


def test_colocated_servers_share_the_trainers_gpus():
    assert first(colocated=True) == 0
    assert first(("--base-gpu-id=1",), colocated=True) == 1


def test_a_gpu_of_the_trainer_is_refused():
    problem = (
        "--base-gpu-id 1: the trainer uses the GPUs 0 to 1; set --base-gpu-id to 2 or more, or"
        " sglang.colocated"
    )
    with pytest.raises(InputError, match=problem):
        first(("--base-gpu-id", "1"))


def test_one_gpu_is_too_few_for_trainer_and_server():
    with pytest.raises(
        InputError,
        match="num_servers=1: the servers need the GPUs 1 to 1, this node has 1; use fewer",
    ):
        first(trainer=1, visible=1)
    with pytest.raises(
        InputError, match="num_servers=2: the servers need the GPUs 2 to 9, this node has 8"
    ):
        first(("--tp", "4"), servers=2)
    assert first(trainer=1, visible=1, colocated=True) == 0


def test_an_index_that_is_no_number():
    with pytest.raises(InputError, match="--base-gpu-id first: must be a GPU's index"):
        first(("--base-gpu-id", "first"))
