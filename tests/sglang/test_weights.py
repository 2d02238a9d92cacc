"""Every weight transport to a real server, which then computes what Transformers does with the
same weights.
"""

from __future__ import annotations

import base64
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_gspo.config import SGLangConfig
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.servers.server_processes import LocalServers
from megatron_gspo.weight_transport.transport import WeightTransport
from megatron_gspo.weight_transport.weight_update import TRANSPORTS, make_transport
from tests.sglang.test_servers import MODULE
from tests.support.real_servers import signal_server
from tests.support.server_engine import update_servers
from tests.support.tiny_models import save_tiny_model
from tests.support.weight_updates import HarmedWeights, VanishingTransport

PROMPT = torch.randint(2, 96, (400,), generator=torch.Generator().manual_seed(3)).tolist()
LAYERS, EXPERTS = 2, 8  # of `sglang_model`
BUCKET = 8000  # bytes: embedding and head have 12 KiB each
TOLERANCE = 2e-5  # of log-probs


def transport_of(name: str, folder: Path | None = None) -> WeightTransport:
    """receiver: what `distributed` is for servers that a run starts."""
    if name == "receiver":
        return make_transport(SGLangConfig(num_servers=1), SGLangAPI())
    config = SGLangConfig(weight_transport=name, weight_dir=str(folder) if folder else None)  # type: ignore[arg-type]
    return make_transport(config, SGLangAPI())


class Weights:
    """Random weights of the served model, and the log-probs that Transformers computes with
    them.
    """

    def __init__(self, folder: Path, seed: int, vocab_size: int) -> None:
        save_tiny_model(folder, seed=seed, vocab_size=vocab_size, num_hidden_layers=LAYERS)
        self.named = load_file(folder / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        self.log_probs = table[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named.items()


class Client:
    """Requests of the tests to servers."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.session = self.loop.run(open_session())

    def server(self, url: str) -> ServerClient:
        return ServerClient(url, self.session)

    def post(self, url: str, path: str, body: dict) -> dict:
        return self.loop.run(self.server(url).post(path, body, timeout=30))

    def score(self, url: str) -> dict:
        """`meta_info` of an answer with the log-probs of PROMPT."""
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
        }
        return self.post(url, "/generate", body)["meta_info"]

    def cache(self, url: str) -> None:
        """Have the prompt in the prefix cache, and see that it is."""
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        self.post(url, "/generate", body)
        assert self.post(url, "/generate", body)["meta_info"]["cached_tokens"] >= len(PROMPT) - 1

    def update(
        self,
        urls: list[str],
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        transport: WeightTransport,
        version: str,
        *,
        timeout: float = 30.0,
    ) -> dict[str, str]:
        return update_servers(
            self.loop,
            [self.server(url) for url in urls],
            weights,
            transport,
            version=version,
            bucket_bytes=BUCKET * transport.in_flight,
            timeout=timeout,
        )

    def version(self, url: str) -> str:
        return self.loop.run(SGLangAPI().weight_version(self.server(url), timeout=10))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.loop.run(client.session.close())
    client.loop.close()


@pytest.fixture(scope="module")
def weights(sglang_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Two sets, neither the one that servers start with, in which every expert gets tokens of
    PROMPT.
    """
    size = AutoModelForCausalLM.from_pretrained(sglang_model).config.vocab_size
    return [Weights(tmp_path_factory.mktemp(f"weights{seed}"), seed, size) for seed in (3, 4)]


@pytest.fixture
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightTransport]:
    transport = transport_of(request.param, folder=tmp_path / "weights")
    yield transport
    transport.close()


every_route = pytest.mark.parametrize("transport", [*TRANSPORTS, "receiver"], indirect=True)


def assert_serves(client: Client, url: str, weights: Weights, version: str) -> None:
    """All of them: every expert of every layer is in use, and nothing comes from the cache of
    older weights.
    """
    meta = client.score(url)
    assert meta["cached_tokens"] == 0 and meta["weight_version"] == version
    routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(
        len(PROMPT), LAYERS, -1
    )
    assert all(len(set(routes[:, layer].ravel().tolist())) == EXPERTS for layer in range(LAYERS))
    log_probs = torch.tensor([row[0] for row in meta["input_token_logprobs"][1:]])
    assert (log_probs - weights.log_probs).abs().max() < TOLERANCE


@every_route
def test_two_updates_in_a_row(
    transport: WeightTransport, client: Client, weights: list[Weights], sglang_url: str
) -> None:
    assert (weights[0].log_probs - weights[1].log_probs).abs().max() > 0.1
    for number in (0, 1, 0):
        client.cache(sglang_url)
        version = f"00c0ffee:{number}"
        assert client.update([sglang_url], weights[number].stream, transport, version) == {}
        assert_serves(client, sglang_url, weights[number], version)


@pytest.mark.parametrize("transport", ["disk", "distributed", "ipc", "receiver"], indirect=True)
def test_a_server_that_hangs_is_named_and_the_other_served(
    transport: WeightTransport,
    client: Client,
    weights: list[Weights],
    sglang_servers: LocalServers,
) -> None:
    """It stops in mid-stream; the stream is still read to its end. Running again, it takes the
    next update.
    """
    sglang_url, url = sglang_servers.urls
    assert client.update([sglang_url, url], weights[0].stream, transport, "a:1") == {}

    stream = HarmedWeights(weights[1].stream, lambda: signal_server(url, MODULE, signal.SIGSTOP))
    try:
        failures = client.update([sglang_url, url], stream.__iter__, transport, "a:2", timeout=2.0)
    finally:
        signal_server(url, MODULE, signal.SIGCONT)
    assert list(failures) == [url] and f"server {url}" in failures[url] and "2 s" in failures[url]
    assert stream.all_read
    assert_serves(client, sglang_url, weights[1], "a:2")
    client.cache(sglang_url)
    assert client.update([sglang_url, url], weights[1].stream, transport, "a:3") == {}
    for place in (sglang_url, url):
        assert_serves(client, place, weights[1], "a:3")


def test_a_checkpoint_that_is_not_there(
    client: Client, weights: list[Weights], sglang_url: str, tmp_path: Path
) -> None:
    vanishing = VanishingTransport(SGLangAPI(), tmp_path)
    failures = client.update([sglang_url], weights[0].stream, vanishing, "b:1")
    assert f"server {sglang_url}/update_weights_from_disk: answered 400" in failures[sglang_url]
    assert client.version(sglang_url) == "b:1:incomplete"
    disk = transport_of("disk", folder=tmp_path)
    assert client.update([sglang_url], weights[0].stream, disk, "b:2") == {}
    assert_serves(client, sglang_url, weights[0], "b:2")


by_broadcast = pytest.mark.parametrize("transport", ["distributed", "receiver"], indirect=True)


@by_broadcast
def test_half_updated_by_a_wrong_shape(
    transport: WeightTransport, client: Client, weights: list[Weights], sglang_url: str
) -> None:
    """A whole update mends it. (In a request by value or handle, upstream dies of a wrong
    shape.)
    """
    wrong = weights[1].named | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(3, 5)}
    failures = client.update([sglang_url], lambda: iter(wrong.items()), transport, "c:1")
    assert f"server {sglang_url}" in failures[sglang_url] and "[3, 5]" in failures[sglang_url]
    meta = client.score(sglang_url)  # the reply has no valid version
    assert meta["weight_version"] == "c:1:incomplete"
    assert client.update([sglang_url], weights[1].stream, transport, "c:2") == {}
    assert_serves(client, sglang_url, weights[1], "c:2")


def test_a_client_that_died_in_its_update(
    client: Client, weights: list[Weights], sglang_url: str
) -> None:
    """It has left the server paused, with an open session where the version has sessions."""
    server_info = client.loop.run(SGLangAPI().server_info(client.server(sglang_url), timeout=10))
    assert (server_info.tp_size, server_info.device, server_info.routed_experts) == (1, "cpu", True)
    assert server_info.max_input_tokens > 100
    client.post(sglang_url, "/pause_generation", {"mode": "abort"})
    if server_info.update_session:
        client.post(sglang_url, "/begin_weight_update", {})
    assert client.update([sglang_url], weights[1].stream, transport_of("tensor"), "e:1") == {}
    assert_serves(client, sglang_url, weights[1], "e:1")
