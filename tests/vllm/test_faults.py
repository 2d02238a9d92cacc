"""Faults between the client and a real vLLM server: every sample is returned once, as the
server sampled it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.vllm.vllm_api import PATH
from megatron_gspo.servers.server_processes import LocalServers
from tests.support import faulty_requests
from tests.support.fault_proxy import VLLM_CHANGES, Fault, FaultProxy
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    counts_of,
    draw,
    engine_on,
    prompts_of,
    set_update_timeout,
)
from tests.support.server_engine import ServerEngine


@pytest.fixture(scope="module")
def proxy(vllm_server: LocalServers) -> Iterator[FaultProxy]:
    with FaultProxy(vllm_server.urls[0], generate=PATH, changes=VLLM_CHANGES) as made:
        yield made


@pytest.fixture(scope="module")
def behind(
    proxy: FaultProxy, vllm_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerEngine]:
    """An engine whose one server is behind the proxy. A hang in a request isn't taken for one of
    the server. The limits are of a busy machine."""
    folder = tmp_path_factory.mktemp("weights")
    engine = engine_on(
        [proxy.url],
        vllm_model,
        kind="vllm",
        routes=False,
        weight_transport="disk",
        folder=folder,
        health_timeout=60.0,
        update_timeout=120.0,
    )
    engine.update_weights(checkpoint_stream(vllm_model), version=0)
    draw(engine, vllm_model, prompts_of([5], VOCABULARY))  # the server's first one may take seconds
    yield engine
    engine.close()


@pytest.fixture
def engine(behind: ServerEngine, proxy: FaultProxy) -> Iterator[ServerEngine]:
    counts_of(behind)
    proxy.requests.clear()
    yield behind
    proxy.clear()


def test_a_fault_that_lasts_ends_with_one_line_that_names_the_request(
    engine, proxy, vllm_model, monkeypatch
):
    """vLLM's health check is a request for a token, so that the fault befalls it too and the
    server counts as gone.
    """
    monkeypatch.setattr(engine.client, "recovery_timeout", 2.0)
    proxy.add(Fault("half", times=10**6))
    reason = rf"server {proxy.url}{PATH}: the connection broke \(ended within the answer\)"
    with pytest.raises(
        EngineError, match=rf"^no server has answered for 2 s: {proxy.url}: .*{reason}$"
    ):
        draw(engine, vllm_model, prompts_of([5], VOCABULARY))
    proxy.clear()
    assert engine.client.wait_for_server(120)
    draw(engine, vllm_model, prompts_of([5], VOCABULARY))  # the engine is as good as before


def test_a_server_that_does_not_answer_an_update_is_dropped_within_the_deadline(
    engine, proxy, vllm_model, monkeypatch
):
    version = engine.weight_version
    set_update_timeout(engine, 15.0, monkeypatch)
    proxy.add(Fault("hang", path="/pause"))
    engine.client.loop.run(
        engine.client.pool.mark_stale(engine.client.pool.servers[0], "so that it needs an update")
    )
    with pytest.raises(EngineError, match=f"no server took weights {version}: .*/pause.* 15 s"):
        engine.update_weights(checkpoint_stream(vllm_model), version=version)
    assert not engine.client.pool.serving
    monkeypatch.undo()
    assert engine.client.wait_for_server(120)
    draw(engine, vllm_model, prompts_of([5], VOCABULARY))
    assert counts_of(engine)["rollout/servers"] == 1


def test_an_interrupted_response_goes_on_under_new_weights(engine, vllm_model):
    faulty_requests.continue_under_new_weights(engine, vllm_model, length=200)
