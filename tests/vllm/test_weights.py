"""Weight updates of a real server: it computes what Transformers does with the same weights,
and nothing in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.reference_models import checkpoint
from tests.support.server_agreement import TOLERANCE
from tests.support.server_clients import VOCABULARY, engine_on, prompts_of
from tests.support.server_engine import ServerEngine, update_servers
from tests.support.ties import without_ties
from tests.support.transformers_reference import response_log_probs
from tests.support.weight_updates import VanishingTransport, changed_model

SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=12)
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
TRANSPORTS = ("disk", "distributed")


@pytest.fixture(scope="module", params=TRANSPORTS)
def engine(
    request, vllm_server: LocalServers, vllm_model: str, tmp_path_factory
) -> Iterator[ServerEngine]:
    engine = engine_on(
        vllm_server.urls,
        vllm_model,
        kind="vllm",
        routes=False,
        weight_transport=request.param,
        folder=tmp_path_factory.mktemp("weights"),
        weight_checksums=True,
    )
    yield engine
    engine.close()


def update(engine: ServerEngine, model: torch.nn.Module, version: int) -> None:
    weights = {name: tensor.float() for name, tensor in checkpoint(model).items()}
    engine.update_weights(weights.items(), version=version)


def all_digests(engine: ServerEngine) -> dict[str, str]:
    """SHA-256 of the server's parameters, by vLLM's own check."""
    server = engine.client.pool.servers[0].client
    return engine.client.loop.run(
        server.post("/weight_checker", {"action": "checksum"}, timeout=60)
    )["checksums"]


def digests(engine: ServerEngine) -> dict[str, str]:
    """Those of parameters that have bytes: on a CPU vLLM keeps those that it packs elsewhere."""
    return {name: digest for name, digest in all_digests(engine).items() if digest != EMPTY}


def check(engine: ServerEngine, model: torch.nn.Module, version: int) -> list[Sample]:
    generated = engine.generate(
        prompts_of([4, 30, 150], VOCABULARY, seed=version), SAMPLING, seed=version
    )
    clear = without_ties(model, generated)
    for sample in clear:
        assert set(sample.token_versions.tolist()) == {version}
        log_probs = response_log_probs(model, sample)[0].detach().numpy()
        np.testing.assert_allclose(sample.rollout_log_probs, log_probs, rtol=0, atol=TOLERANCE)
    return clear


@pytest.fixture(scope="module")
def seen() -> dict[int, dict[str, str]]:
    """Digests of the versions, by the first transport."""
    return {}


def test_an_update_gives_the_weights_of_its_version(
    engine: ServerEngine, vllm_model: str, seen
) -> None:
    digests_by_version = {}
    for version in (1, 2):
        model = changed_model(vllm_model, version)
        update(engine, model, version)
        samples = check(engine, model, version)
        other = response_log_probs(changed_model(vllm_model, 3), samples[0])[0].detach().numpy()
        assert np.abs(samples[0].rollout_log_probs - other).max() > 100 * TOLERANCE, (
            "versions must differ"
        )
        digests_by_version[version] = digests(engine)
    assert len(digests_by_version[1]) >= 10 and all(
        digests_by_version[1][name] != digests_by_version[2][name] for name in digests_by_version[1]
    )
    for version, each in digests_by_version.items():
        assert seen.setdefault(version, each) == each, "both transports give the same parameters"


def test_an_update_that_leaves_a_parameter_out_is_found(
    engine: ServerEngine, vllm_model: str
) -> None:
    """By /weight_checker: what was sent arrived, and the layers are complete."""
    weights = {
        name: tensor.float() for name, tensor in checkpoint(changed_model(vllm_model, 3)).items()
    }
    del weights["model.norm.weight"]
    reason = r"the update did not write 1 of its parameters, the first: \S*:model.norm.weight"
    with pytest.raises(EngineError, match=f"no server took weights 3: http://.*{reason}"):
        engine.update_weights(weights.items(), version=3)
    assert not engine.client.pool.serving
    update(engine, changed_model(vllm_model, 3), 3)
    check(engine, changed_model(vllm_model, 3), 3)


def test_what_a_cpu_cannot_prove_is_told_once(
    engine: ServerEngine, vllm_model: str, monkeypatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(engine.sync, "_log", lines.append)
    engine.sync._told.clear()
    for _ in range(2):
        engine.client.loop.run(
            engine.client.pool.mark_stale(
                engine.client.pool.servers[0], "so that it needs an update"
            )
        )
        update(engine, changed_model(vllm_model, 3), 3)
    proven = len(digests(engine))
    total = len(all_digests(engine))
    assert 10 <= proven < total, "vLLM packs experts and projections for its CPU kernels"
    assert [f"prove {proven} of {total} parameters" in line for line in lines] == [True]


def test_a_server_that_frees_no_memory_is_refused_where_it_is_colocated(
    vllm_server, vllm_model, tmp_path
) -> None:
    """On a CPU it answers to /sleep and /wake_up, and has its weights in between."""
    colocated = engine_on(
        vllm_server.urls,
        vllm_model,
        kind="vllm",
        routes=False,
        weight_transport="disk",
        folder=tmp_path,
        colocated=True,
    )
    try:
        with pytest.raises(
            EngineError, match=r"^server http://\S+: it can't free its memory .*--enable-sleep-mode"
        ):
            colocated.client.check_servers()
        server = colocated.client.pool.servers[0].client
        api = colocated.client.api
        before = all_digests(colocated)
        colocated.client.loop.run(api.release_memory(server, timeout=30))
        assert all_digests(colocated) == before
        for kind in ("weights", "kv_cache"):
            colocated.client.loop.run(api.restore_memory(server, kind, timeout=30))
        colocated.client.loop.run(api.check_health(server, timeout=30))
    finally:
        colocated.close()


def test_a_failed_update_leaves_the_server_out_until_one_succeeds(
    engine: ServerEngine, vllm_model: str
) -> None:
    good = changed_model(vllm_model, 4)
    version = 4
    broken = {name: tensor.float() for name, tensor in checkpoint(good).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    broken[name] = broken[name][:, :-1].contiguous()
    with pytest.raises(EngineError, match=f"no server took weights {version}: http://"):
        engine.update_weights(broken.items(), version=version)
    assert not engine.client.pool.serving
    server = engine.client.pool.servers[0].client
    assert engine.client.loop.run(engine.client.api.weight_version(server, timeout=10)).endswith(
        ":incomplete"
    )
    update(engine, good, version)
    check(engine, good, version)


def test_a_checkpoint_that_is_not_there(engine: ServerEngine, vllm_model: str, tmp_path) -> None:
    """It leaves the server without a valid version, and with its layers ready for the next
    update of any transport.
    """
    server = engine.client.pool.servers[0].client
    weights = checkpoint(changed_model(vllm_model, 6).float())
    vanishing = VanishingTransport(engine.client.api, tmp_path, source=vllm_model)
    failures = update_servers(
        engine.client.loop,
        [server],
        weights.items,
        vanishing,
        version="gone:6",
        bucket_bytes=2**20,
        timeout=60.0,
    )
    assert failures[server.url].startswith(f"server {server.url}/collective_rpc: answered 500")
    assert (
        engine.client.loop.run(engine.client.api.weight_version(server, timeout=10))
        == "gone:6:incomplete"
    )
    update(engine, changed_model(vllm_model, 6), 6)
    check(engine, changed_model(vllm_model, 6), 6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_died_in_its_update(
    vllm_server: LocalServers, vllm_model: str, tmp_path, transport: str
) -> None:
    """It has left the server paused, without a valid version, and with parameters that are zero.
    The next run, which knows nothing of this, finds it so."""

    def begin() -> ServerEngine:
        return engine_on(
            vllm_server.urls,
            vllm_model,
            kind="vllm",
            routes=False,
            weight_transport=transport,
            folder=tmp_path,
            weight_checksums=True,
        )

    with closing(begin()) as died:
        server = died.client.pool.servers[0].client
        died.client.loop.run(died.client.api.pause(server, timeout=30))
        died.client.loop.run(
            died.client.api.set_version(server, "another:1:incomplete", timeout=30)
        )
        died.client.loop.run(died.client.api.clear_weights(server, timeout=60))
    with closing(begin()) as engine:
        engine.client.check_servers()
        update(engine, changed_model(vllm_model, 7), 7)
        check(engine, changed_model(vllm_model, 7), 7)
