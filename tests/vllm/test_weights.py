"""Weight updates of a real server: it computes what Transformers does with the same weights, and nothing in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine.request_stream import WeightsNeeded
from megatron_gspo.rollout.server_engine.server_engine import ServerEngine
from megatron_gspo.servers.server_processes import LocalServers
from tests.support.reference_models import checkpoint
from tests.support.server_clients import counts_of, engine_on, prompts_of
from tests.support.ties import without_ties
from tests.support.transformers_reference import load_reference, response_log_probs
from tests.vllm.test_agreement import TOLERANCE, VOCABULARY

SAMPLING = SamplingParams(n_samples_per_prompt=2, max_response_length=12)
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
TRANSPORTS = ("disk", "distributed")


@pytest.fixture(scope="module", params=TRANSPORTS)
def engine(request, vllm_server: LocalServers, vllm_model: str, tmp_path_factory) -> Iterator[ServerEngine]:
    engine = engine_on(vllm_server.urls, vllm_model, kind="vllm", routes=False, weight_transport=request.param,
                       folder=tmp_path_factory.mktemp("weights"), weight_checksums=request.param == "distributed")
    yield engine
    engine.close()


def model_of(path: str, version: int) -> torch.nn.Module:
    """The model after an update: every version has other weights, as they travel."""
    model, generator = load_reference(path), torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((parameter * (1 + 0.05 * version * noise)).float())
    return model


def update(engine: ServerEngine, model: torch.nn.Module, version: int) -> None:
    weights = {name: tensor.float() for name, tensor in checkpoint(model).items()}
    engine.update_weights(weights.items(), version=version)


def digests(engine: ServerEngine) -> dict[str, str]:
    """SHA-256 of the server's parameters, by vLLM's own check. On a CPU, those that it has packed are empty."""
    server = engine._pool.servers[0].client
    answer = engine._loop.run(server.post("/weight_checker", {"action": "checksum"}, timeout=60))
    return {name: digest for name, digest in answer["checksums"].items() if digest != EMPTY}


def check(engine: ServerEngine, model: torch.nn.Module, version: int) -> list[Sample]:
    found = engine.generate(prompts_of([4, 30, 150], VOCABULARY, seed=version), SAMPLING, seed=version)
    clear = without_ties(model, found)
    for sample in clear:
        assert set(sample.token_versions.tolist()) == {version}
        log_probs = response_log_probs(model, sample)[0].detach().numpy()
        np.testing.assert_allclose(sample.rollout_log_probs, log_probs, rtol=0, atol=TOLERANCE)
    return clear


@pytest.fixture(scope="module")
def seen() -> dict[int, dict[str, str]]:
    """Digests of the versions, by the first transport."""
    return {}


def test_an_update_gives_the_weights_of_its_version(engine: ServerEngine, vllm_model: str, seen) -> None:
    found = {}
    for version in (1, 2):
        model = model_of(vllm_model, version)
        update(engine, model, version)
        samples = check(engine, model, version)
        other = response_log_probs(model_of(vllm_model, 3), samples[0])[0].detach().numpy()
        assert np.abs(samples[0].rollout_log_probs - other).max() > 100 * TOLERANCE, "versions must differ"
        found[version] = digests(engine)
    assert len(found[1]) >= 10 and all(found[1][name] != found[2][name] for name in found[1])
    for version, each in found.items():
        assert seen.setdefault(version, each) == each, "both transports give the same parameters"


def test_a_failed_update_leaves_the_server_out_until_one_succeeds(engine: ServerEngine, vllm_model: str) -> None:
    good, version = model_of(vllm_model, 4), 4
    broken = {name: tensor.float() for name, tensor in checkpoint(good).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    broken[name] = broken[name][:, :-1].contiguous()
    with pytest.raises(EngineError, match=f"no server took weights {version}: http://"):
        engine.update_weights(broken.items(), version=version)
    assert not engine._pool.serving
    server = engine._pool.servers[0].client
    assert engine._loop.run(engine._api.weight_version(server, timeout=10)).endswith(":incomplete")
    update(engine, good, version)
    check(engine, good, version)


def test_no_reply_of_a_foreign_version_is_accepted(engine: ServerEngine, vllm_model: str) -> None:
    """Another process changes the server's version: its replies are refused, and an update brings it back."""
    model = model_of(vllm_model, 5)
    update(engine, model, 5)
    server = engine._pool.servers[0].client
    engine._loop.run(engine._endpoints.set_version(server, "another:5", timeout=10))
    stream = engine.client.stream()
    stream.start(prompts_of([10], VOCABULARY), SAMPLING, seed=1)
    with pytest.raises(WeightsNeeded):
        stream.take(1)
    assert counts_of(engine)["rollout/stale_responses"] >= 1
    update(engine, model, 5)
    [group] = stream.take(1)
    assert all(sample.weight_version == 5 for sample in group)
