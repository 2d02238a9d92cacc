"""Real local servers: they end with their trainer, want its key, and report why they can't start.

That they serve, and restart after SIGKILL, is in the other files.
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
from tests.support.real_servers import processes_of
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    draw,
    engine_on,
    prompts_of,
)
from tests.support.trainer_process import (
    KEY,
    end_with_the_trainer,
    require_and_hide_the_key,
    trainer_process,
)

MODULE = "sglang.launch_server"


def generate(url: str, key: str) -> dict:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--no-such-option", "1"), "correct sglang.server_args.*--no-such-option"),
        pytest.param(
            ("--enable-deterministic-inference",),
            "none without a GPU; .*deterministic inference, but .* 'torch_native'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_arguments_that_sglang_refuses_are_named(
    trainer, sglang_model, sglang_python, tmp_path, args, message
):
    config = SGLangConfig(num_servers=1, python=sglang_python, server_args=args)
    with pytest.raises(EngineError, match=message) as error:
        LocalServers(SGLangLaunch(config, sglang_model, log_dir=str(tmp_path))).start()
    assert "\n" not in str(error.value) and str(tmp_path / "server_0.log") in str(error.value)


def test_servers_start_from_a_worker_of_torchrun(trainer):
    assert trainer.url.startswith("http://127.0.0.1:")


def test_the_api_key_is_asked_for_and_nobody_sees_it(trainer):
    require_and_hide_the_key(trainer, generate)


def test_the_client_needs_the_key_and_does_not_show_it(trainer, sglang_model, capfd, tmp_path):
    with_key = engine_on([trainer.url], sglang_model, routes=False, api_key_file=trainer.key_file)
    try:
        with_key.update_weights(checkpoint_stream(sglang_model), version=0)
        draw(with_key, sglang_model, prompts_of([5], VOCABULARY))
    finally:
        with_key.close()
    (tmp_path / "wrong").write_text("a-wrong-key\n")
    for file in (str(tmp_path / "wrong"), None):
        without = engine_on([trainer.url], sglang_model, api_key_file=file)
        try:
            with pytest.raises(
                EngineError,
                match=r"^server \S+: refused with 401; set sglang.api_key_file \(or vllm",
            ):
                without.update_weights(checkpoint_stream(sglang_model), version=0)
        finally:
            without.close()
    said = capfd.readouterr()
    assert KEY not in said.out + said.err and "a-wrong-key" not in said.out + said.err
    assert KEY not in repr(vars(with_key.client)) + repr(vars(with_key.client.pool))


def test_a_server_ends_with_its_trainer(trainer):
    assert any(
        "sglang::scheduler" in " ".join(p.cmdline()) for p in processes_of(trainer.url, MODULE)
    )
    end_with_the_trainer(trainer)
