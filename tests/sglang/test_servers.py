"""Real local servers: they serve, restart after SIGKILL, end with their trainer, and report why
they can't start.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from megatron_gspo.config import SGLangConfig
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import main_process, processes_of
from tests.support.trainer_process import (
    end_with_the_trainer,
    require_and_hide_the_key,
    trainer_process,
)
from tests.support.waiting import wait_for

MODULE = "sglang.launch_server"


def generate(url: str, key: str = "") -> dict:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"{url}/generate", data=json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def trainer(
    sglang_model: str, sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator:
    """Its server is begun while other tests run."""
    folder = tmp_path_factory.mktemp("trainer")
    with trainer_process("sglang", MODULE, sglang_model, sglang_python, folder) as trainer:
        yield trainer


def test_a_server_serves_and_comes_back_after_sigkill(sglang_server, trainer):
    url = sglang_server.urls[0]
    before = generate(url)
    assert len(before["output_ids"]) == 4 and before["meta_info"]["routed_experts"]
    old = processes_of(url, MODULE)
    main_process(url, MODULE).kill()
    assert wait_for(sglang_server.poll, 30).died == [url]
    changes = wait_for(sglang_server.poll, 240)
    assert changes.restarted == [url] and not changes.given_up
    assert not [process.pid for process in old if process.is_running()], (
        "left behind by the first life"
    )
    assert generate(url)["meta_info"]["completion_tokens"] == 4


def test_servers_start_from_a_worker_of_torchrun(trainer):
    assert trainer.url.startswith("http://127.0.0.1:")


def test_the_api_key_is_asked_for_and_nobody_sees_it(trainer):
    require_and_hide_the_key(trainer, generate)


def test_a_server_ends_with_its_trainer(trainer):
    assert any(
        "sglang::scheduler" in " ".join(p.cmdline()) for p in processes_of(trainer.url, MODULE)
    )
    end_with_the_trainer(trainer)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--no-such-option", "1"), "correct sglang.server_args.*--no-such-option"),
        (
            ("--enable-deterministic-inference",),
            "none without a GPU; .*deterministic inference, but .* 'torch_native'",
        ),
    ],
)
def test_arguments_that_sglang_refuses_are_named(
    sglang_model, sglang_python, tmp_path, args, message
):
    config = SGLangConfig(num_servers=1, python=sglang_python, server_args=args)
    with pytest.raises(EngineError, match=message) as error:
        LocalServers(SGLangLaunch(config, sglang_model, log_dir=str(tmp_path))).start()
    assert "\n" not in str(error.value) and str(tmp_path / "server_0.log") in str(error.value)
