"""What vLLM servers on this node are started with. No server is started here."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from megatron_gspo.config import VLLMConfig
from megatron_gspo.errors import InputError
from megatron_gspo.rollout.vllm.vllm_launch import EXTENSION_FOLDER, VLLMLaunch
from megatron_gspo.servers import http_client
from megatron_gspo.servers.server_launch import option
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER


def launch(args: tuple[str, ...] = (), colocated: bool = False, **settings: object) -> VLLMLaunch:
    config = VLLMConfig(num_servers=2, python="/env/python", server_args=args, colocated=colocated)
    return VLLMLaunch(config, "hub/model", **settings)


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request, monkeypatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


def test_the_command(gpu):
    given = ("--max-num-seqs", "64", "--logprobs-mode=raw_logprobs")
    made = launch(given, True, routed_experts=True).command(1, 31001, key_file="/key.yaml")
    assert made[:4] == ["/env/python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    expected = {
        "--model": "hub/model",
        "--host": "127.0.0.1",
        "--port": "31001",
        "--dtype": "auto",
        "--config": "/key.yaml",
        "--generation-config": "vllm",
        "--worker-extension-cls": "megatron_gspo_worker.WeightReceiver",
    }
    assert {name: option(made, name) for name in expected} == expected
    assert {
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--enable-return-routed-experts",
    } < set(made)
    assert ("--enforce-eager" in made, "--enable-sleep-mode" in made) == (not gpu, gpu)
    assert option(made[: -len(given)], "--logprobs-mode") == "processed_logprobs"
    assert tuple(made[-3:]) == given


def test_colocated_servers_are_refused_on_a_cpu_before_they_start(gpu, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = VLLMConfig(num_servers=1, python=sys.executable, colocated=True)
    made = VLLMLaunch(config, str(tmp_path))
    made.__dict__["version"] = (0, 32, 0)  # of an interpreter that has it
    if gpu:
        made.check()
        return
    with pytest.raises(
        InputError, match="^vllm.colocated=true: vLLM frees no memory on a CPU; set it to false$"
    ):
        made.check()


def test_the_environment(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7,11,13")
    monkeypatch.setenv("RANK", "3")
    environment = launch(("--tensor-parallel-size", "2"), first_gpu=1).environment(1)
    assert environment["PYTHONPATH"].split(os.pathsep) == [
        str(RECEIVER_FOLDER),
        str(EXTENSION_FOLDER),
    ]
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > http_client._IDLE_SECONDS + 30
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and "RANK" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == ("7,11" if gpu else "2,3,5,7,11,13")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch(first_gpu=1).environment(1).get("CUDA_VISIBLE_DEVICES") == ("2" if gpu else None)
    assert environment.get("OMP_NUM_THREADS") == "1" or gpu


def test_gpus_of_a_server():
    assert VLLMLaunch.gpus_per_server(("--tensor-parallel-size", "4", "-dp=2")) == 8
    with pytest.raises(
        InputError, match="vllm.server_args: --tensor-parallel-size many: must be a positive number"
    ):
        VLLMLaunch.gpus_per_server(("-tp", "many"))


@pytest.mark.parametrize(
    "argument, key",
    [
        ("--port=1", "port"),
        ("--api-key", "api_key_file"),
        ("--worker-extension-cls=x.Y", "weight_transport"),
    ],
)
def test_what_the_client_needs_too_is_set_by_the_config(argument, key):
    with pytest.raises(
        InputError, match=rf"vllm.server_args: \S+ is reserved; set vllm.{key} instead"
    ):
        launch((argument, "1"))
