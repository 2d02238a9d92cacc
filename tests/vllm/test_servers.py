"""vLLM's servers as processes, and two of them as one engine's: a key, a trainer that ends, a
server that hangs.

A server that is killed, restarts and gets the weights again is in `test_faults_in_runs.py`. A
second server starts for this file: `make test-vllm` runs it, `.ci/run` does not.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from megatron_gspo.config import VLLMConfig
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.vllm.vllm_api import PATH
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.real_servers import signal_server
from tests.support.reference_models import checkpoint
from tests.support.server_agreement import TOLERANCE
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    engine_on,
    prompts_of,
    set_update_timeout,
)
from tests.support.server_engine import ServerEngine
from tests.support.trainer_process import (
    KEY,
    TrainerProcess,
    end_with_the_trainer,
    require_and_hide_the_key,
    trainer_process,
)
from tests.support.waiting import wait_for
from tests.support.weight_updates import HarmedWeights, changed_model
from tests.vllm.test_faults_in_runs import MODULE
from tests.vllm.test_weights import check

pytestmark = pytest.mark.slow
LIMITS = {"health_timeout": 60.0, "update_timeout": 120.0}  # of a busy machine


def generate(url: str, key: str) -> dict:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "detokenize": False}}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + PATH, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def trainer(
    vllm_model: str, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerProcess]:
    """Its server requires a key."""
    folder = tmp_path_factory.mktemp("trainer")
    with trainer_process("vllm", MODULE, vllm_model, vllm_python, folder) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def pair(
    vllm_server: LocalServers, trainer: TrainerProcess, vllm_model: str
) -> Iterator[ServerEngine]:
    """Two servers: the first accepts any key; the second requires one.
    Updates have many buckets.
    """
    urls = [vllm_server.urls[0], trainer.url]
    key = trainer.key_file
    with closing(
        engine_on(
            urls,
            vllm_model,
            kind="vllm",
            routes=False,
            weight_transport="distributed",
            api_key_file=key,
            weight_bucket_mb=0.05,
            **LIMITS,
        )
    ) as engine:
        engine.update_weights(checkpoint_stream(vllm_model), version=0)
        yield engine


def test_arguments_that_vllm_refuses_are_named(vllm_model, vllm_python, tmp_path):
    config = VLLMConfig(num_servers=1, python=vllm_python, server_args=("--no-such-option", "1"))
    with pytest.raises(EngineError, match="correct vllm.server_args.*--no-such-option") as error:
        LocalServers(VLLMLaunch(config, vllm_model, log_dir=str(tmp_path))).start()
    assert "\n" not in str(error.value) and str(tmp_path / "server_0.log") in str(error.value)


def test_the_api_key_is_asked_for_and_nobody_sees_it(trainer):
    require_and_hide_the_key(trainer, generate)


@pytest.mark.parametrize("key", ["a-wrong-key", None])
def test_without_the_key_a_run_ends_at_its_start(trainer, vllm_model, tmp_path, capfd, key):
    """vLLM guards the generations alone: its other endpoints answer without a key."""
    (tmp_path / "key").write_text(f"{key}\n")
    with closing(
        engine_on(
            [trainer.url],
            vllm_model,
            kind="vllm",
            routes=False,
            weight_transport="distributed",
            api_key_file=str(tmp_path / "key") if key else None,
            **LIMITS,
        )
    ) as engine:
        with pytest.raises(
            EngineError, match=rf"^server \S+{PATH}: refused with 401; set .*vllm.api_key_file"
        ):
            engine.client.check_servers()
        assert KEY not in repr(vars(engine)) + repr(vars(engine.client.pool))
    said = capfd.readouterr()
    assert KEY not in said.out + said.err and "a-wrong-key" not in said.out + said.err


def test_a_server_that_hangs_in_an_update_is_named_and_the_other_served(
    pair, trainer, vllm_model, monkeypatch
):
    """It stops in mid-stream; the stream is still read to its end. Running again, it takes the
    weights.
    """
    lines: list[str] = []
    monkeypatch.setattr(pair.client, "_log", lines.append)
    set_update_timeout(pair, 15.0, monkeypatch)
    model = changed_model(vllm_model, 8)
    version = 8
    sent = {name: tensor.float() for name, tensor in checkpoint(model).items()}
    weights = HarmedWeights(
        lambda: iter(sent.items()), lambda: signal_server(trainer.url, MODULE, signal.SIGSTOP)
    )
    try:
        pair.update_weights(weights, version=version)
        assert weights.all_read
        assert [server.url for server in pair.client.pool.serving] == [
            pair.client.pool.servers[0].url
        ]
        [line] = [line for line in lines if line.startswith(f"weights {version}: ")]
        assert f"server {trainer.url}" in line and "15 s" in line
        check(pair, model, version)
    finally:
        signal_server(trainer.url, MODULE, signal.SIGCONT)
    monkeypatch.undo()
    wait_for(lambda: all(server.alive for server in pair.client.pool.servers), 120)
    pair.update_weights(sent.items(), version=version)
    first, second = pair.score(
        [prompt.token_ids for prompt in prompts_of([40], VOCABULARY, seed=4)]
    ).values()
    np.testing.assert_allclose(first[0], second[0], rtol=0, atol=TOLERANCE)
    check(pair, model, version)


def test_a_server_ends_with_its_trainer(trainer):
    end_with_the_trainer(trainer)
