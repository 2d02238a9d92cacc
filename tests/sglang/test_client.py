"""The client of real servers, with faults between the two: every sample is returned once, as
the model sampled it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_gspo.config import SamplingParams
from megatron_gspo.errors import EngineError
from megatron_gspo.rollout.server_engine import response_generator
from megatron_gspo.servers.server_processes import LocalServers
from tests.sglang.conftest import StartServers
from tests.support import faulty_requests
from tests.support.fault_proxy import PASSING_FAULTS, Fault, FaultProxy
from tests.support.server_clients import (
    VOCABULARY,
    checkpoint_stream,
    counts_of,
    draw,
    engine_on,
    prompts_of,
)
from tests.support.server_engine import ServerEngine
from tests.support.trainer_process import KEY


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "key"
    file.write_text(KEY + "\n")
    return str(file)


@pytest.fixture(scope="module")
def keyed(start_servers: StartServers, key_file: str) -> LocalServers:
    """A server that requires a key."""
    return start_servers(count=1, api_key_file=key_file)


@pytest.fixture(scope="module")
def proxy(sglang_server: LocalServers) -> Iterator[FaultProxy]:
    with FaultProxy(sglang_server.urls[0]) as made:
        yield made


@pytest.fixture(scope="module")
def behind(proxy: FaultProxy, sglang_model: str) -> Iterator[ServerEngine]:
    """An engine whose one server is behind the proxy.

    A hang in a request isn't taken for one of the server.
    """
    engine = engine_on([proxy.url], sglang_model, health_timeout=20.0)
    engine.update_weights(checkpoint_stream(sglang_model), version=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(behind: ServerEngine, proxy: FaultProxy) -> Iterator[ServerEngine]:
    counts_of(behind)
    proxy.requests.clear()
    yield behind
    proxy.clear()


@pytest.mark.parametrize("name", PASSING_FAULTS)
def test_a_fault_that_passes_is_survived_and_told(engine, proxy, sglang_model, name, monkeypatch):
    fault, counted = PASSING_FAULTS[name]
    times = fault.times
    waits = name in ("hang", "late")
    if waits:
        # The server's first one may take seconds.
        draw(engine, sglang_model, prompts_of([5], VOCABULARY))
        impatient = replace(engine.client._config, request_timeout=4.0)
        monkeypatch.setattr(engine.client, "_config", impatient)
        counts_of(engine)
        proxy.requests.clear()
    proxy.add(replace(fault))
    samples = draw(engine, sglang_model, prompts_of([5, 9, 12], VOCABULARY))
    assert proxy.pending == 0
    assert all(sample.weight_version == 0 for sample in samples)
    counts = counts_of(engine)
    assert counts["rollout/retries"] == times or (waits and counts["rollout/retries"] > times), (
        "a slow machine's own"
    )
    # an update interrupts the others, which then continue: these may have two parts
    assert counts["rollout/requests"] == 6 + counts["rollout/continued"]
    assert counts["rollout/continued"] == 0 or counted == "stale_responses"
    assert counts["rollout/refused"] == (counted == "refused")
    assert counts["rollout/stale_responses"] == (counted == "stale_responses")
    assert counts["rollout/discarded_tokens"] == 0 and counts["rollout/servers"] == 1
    updates = sum(path == "/continue_generation" for path in proxy.requests)
    assert updates == (counted == "stale_responses"), "only other weights need an update"


@pytest.mark.parametrize("kind", ["few_routes", "half"])
def test_a_fault_that_lasts_ends_with_one_line_that_names_the_request(
    engine, proxy, sglang_model, kind, monkeypatch
):
    monkeypatch.setattr(response_generator, "_BACKOFF_SECONDS", 0.02)
    proxy.add(Fault(kind, times=10**6))
    with pytest.raises(
        EngineError, match=r"^sample 0/[01]: given up after 5 tries in \d+ s; the last: "
    ) as caught:
        draw(engine, sglang_model, prompts_of([5], VOCABULARY))
    assert "\n" not in str(caught.value)
    proxy.clear()
    draw(engine, sglang_model, prompts_of([5], VOCABULARY))  # the engine is as good as before


def test_an_update_that_fails_leaves_a_server_out_until_one_succeeds(engine, proxy, sglang_model):
    version = engine.weight_version
    proxy.add(Fault("error", path="/update_weights_from_tensor"))
    with pytest.raises(
        EngineError, match=f"no server took weights {version}: .*update_weights_from_tensor.*500"
    ):
        engine.client.loop.run(
            engine.client.pool.mark_stale(
                engine.client.pool.servers[0], "so that it needs an update"
            )
        )
        engine.update_weights(checkpoint_stream(sglang_model), version=version)
    assert not engine.client.pool.serving
    assert engine.client.wait_for_server(20)
    samples = draw(engine, sglang_model, prompts_of([5], VOCABULARY))  # updates it on the way
    assert (
        all(sample.weight_version == version for sample in samples)
        and counts_of(engine)["rollout/servers"] == 1
    )


def test_an_interrupted_response_goes_on_under_new_weights(engine, sglang_model):
    faulty_requests.continue_under_new_weights(engine, sglang_model, length=350)


def test_priming_a_prompt_raises_what_is_cached(engine, sglang_model, monkeypatch):
    sampling = SamplingParams(n_samples_per_prompt=4, max_response_length=4)

    def cached(seed: int) -> float:
        counts_of(engine)
        draw(engine, sglang_model, prompts_of([130] * 3, VOCABULARY, seed=seed), sampling)
        return counts_of(engine)["rollout/cached_share"]

    primed = cached(21)
    monkeypatch.setattr(response_generator, "_MIN_PREFILL_TOKENS", 10**6)
    assert primed > 0.9 and primed > cached(22)


def test_seeds_repeat_draws_where_the_server_heeds_them(engine, sglang_model):
    """This server doesn't (it needs --enable-deterministic-inference): sampled draws differ,
    greedy ones don't.
    """
    prompts = prompts_of([20, 30], VOCABULARY, seed=5)
    greedy = SamplingParams(n_samples_per_prompt=2, max_response_length=16, temperature=0.0)
    first, again = (draw(engine, sglang_model, prompts, greedy) for _ in range(2))
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    assert first[0].tokens.tolist() == first[1].tokens.tolist()
    sampled = draw(
        engine,
        sglang_model,
        prompts,
        SamplingParams(n_samples_per_prompt=4, max_response_length=16),
    )
    assert len({tuple(sample.tokens.tolist()) for sample in sampled}) > 4, (
        "two may be equal if they end at once"
    )


def test_a_key_is_needed_and_shown_nowhere(keyed, key_file, sglang_model, capfd, tmp_path):
    with_key = engine_on(keyed.urls, sglang_model, api_key_file=key_file)
    try:
        with_key.update_weights(checkpoint_stream(sglang_model), version=0)
        draw(with_key, sglang_model, prompts_of([5], VOCABULARY))
    finally:
        with_key.close()
    (tmp_path / "wrong").write_text("a-wrong-key\n")
    for file in (str(tmp_path / "wrong"), None):
        without = engine_on(keyed.urls, sglang_model, api_key_file=file)
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


@pytest.fixture(scope="module")
def pair(
    proxy: FaultProxy, keyed: LocalServers, key_file: str, sglang_model: str
) -> Iterator[ServerEngine]:
    """Two servers: the first, behind the proxy, accepts any key; the second requires one. From now
    on it has the weights of this engine."""
    engine = engine_on([proxy.url, keyed.urls[0]], sglang_model, api_key_file=key_file)
    engine.update_weights(checkpoint_stream(sglang_model), version=0)
    yield engine
    engine.close()


def test_two_servers_share_the_load(pair, proxy, sglang_model):
    counts_of(pair)
    proxy.requests.clear()
    draw(pair, sglang_model, prompts_of([10] * 12, VOCABULARY, seed=2))
    mine = proxy.requests.count("/generate")
    assert 8 <= mine <= 16 and counts_of(pair)["rollout/requests"] == 24
    assert [member.outstanding_tokens for member in pair.client.pool.servers] == [0, 0]


def test_one_with_old_weights_is_left_out_and_the_other_does_all(pair, proxy, sglang_model):
    faulty_requests.leave_out_old_weights(pair, proxy, sglang_model)


def test_one_that_is_gone_and_comes_back_with_the_same_weights(pair, proxy, sglang_model):
    faulty_requests.return_with_the_same_weights(pair, proxy, sglang_model)


def test_a_probe_leaves_out_a_server_that_fails_at_it(pair, proxy, keyed):
    faulty_requests.leave_out_of_a_probe(pair, proxy, keyed.urls[0])
