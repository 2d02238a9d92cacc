"""Adapters alone: what the sources wrote is one directory in PEFT's format, which the servers
load by name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from megatron_gspo.models.peft_files import AdapterFacts, read_adapters
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.vllm.vllm_api import VLLMAPI
from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.adapter_transport import (
    AdapterFileTransport,
    AdapterTensorTransport,
)
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.transport import Sent, Target
from tests.servers.web_server import run_command
from tests.weight_transport.test_weight_update import INFO

FACTS = AdapterFacts(rank=2, alpha=8.0, rslora=True, base="/models/base")
LAYER = "model.layers.0.self_attn.q_proj.lora_"
EXPERT = "model.layers.0.mlp.experts.{}.down_proj.lora_"
PARTS = [
    {f"{LAYER}A.weight": torch.randn(2, 6), f"{LAYER}B.weight": torch.randn(8, 2)},
    {
        f"{EXPERT.format(e)}{m}.weight": torch.randn(2, 4) if m == "A" else torch.randn(6, 2)
        for e in range(3)
        for m in "AB"
    },
]


def written(folder: Path, versions: tuple[str, ...] = ("0a:1",)) -> AdapterFileTransport:
    """The transport of rank 0 after updates of two sources."""
    first = AdapterFileTransport(SGLangAPI(), folder, FACTS)
    for version in versions:
        first.prepare(version)
        for number, tensors in enumerate(PARTS):
            source = AdapterFileTransport(SGLangAPI(), folder, FACTS)
            source.begin(version, number)
            for bucket in buckets(tensors.items(), 40):
                source.store(bucket)
            asyncio.run(source.finish(1.0))
        first.publish(len(PARTS))
    return first


def test_the_sources_files_become_one_in_peft_format(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, ("0a:1", "0a:2")).checkpoint
    assert checkpoint is not None
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]
    assert [path.name for path in checkpoint.iterdir()] == ["adapters"]
    tensors, facts = read_adapters(checkpoint / "adapters")
    assert facts == FACTS
    expected = PARTS[0] | PARTS[1]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    config = json.loads((checkpoint / "adapters" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]


def test_a_server_without_adapters_is_refused(tmp_path: Path) -> None:
    transport = AdapterFileTransport(SGLangAPI(), tmp_path, FACTS)
    able, other = (SimpleNamespace(adapters=adapters) for adapters in (True, False))
    assert transport.unsupported(able) == ""  # type: ignore[arg-type]
    assert "--enable-lora" in transport.unsupported(other)  # type: ignore[arg-type]


def loaded(
    endpoints: Any, answers: dict[str, tuple[int, dict[str, Any]]]
) -> list[tuple[str, dict[str, Any]]]:
    """The requests of one load to a server with these answers."""
    seen: list[tuple[str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        status, body = answers.get(request.path, (200, {"success": True}))
        return web.json_response(body, status=status)

    run_command(lambda server: endpoints.load_adapters(server, Path("/a/b"), timeout=60), answer)
    return seen


@pytest.mark.parametrize("status", [200, 400])
def test_sglang_loads_them_in_place_of_the_last_ones(status: int) -> None:
    seen = loaded(SGLangAPI(), {"/unload_lora_adapter": (status, {"success": status == 200})})
    assert seen == [
        ("/unload_lora_adapter", {"lora_name": "policy"}),
        ("/load_lora_adapter", {"lora_name": "policy", "lora_path": "/a/b"}),
    ]


def test_vllm_loads_them_in_place_of_the_last_ones() -> None:
    assert loaded(VLLMAPI(), {}) == [
        (
            "/v1/load_lora_adapter",
            {"lora_name": "policy", "lora_path": "/a/b", "load_inplace": True},
        )
    ]


@pytest.mark.parametrize(
    ("path", "status"), [("/unload_lora_adapter", 500), ("/load_lora_adapter", 200)]
)
def test_a_server_that_did_not_load_them_has_failed(path: str, status: int) -> None:
    answer = {"success": False, "error_message": "rank too high"}
    with pytest.raises(
        ServerError, match=f"{path}.*" + ("rank too high" if status == 200 else "500")
    ):
        loaded(SGLangAPI(), {path: (status, answer)})


def sent_in_a_request(tp_size: int) -> dict[str, Any]:
    """The body with which SGLang gets the adapters of `PARTS`, which came in small buckets."""
    seen: list[tuple[str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.json_response({"success": True})

    async def update(server: Any) -> None:
        transport = AdapterTensorTransport(SGLangAPI(), FACTS)
        for _ in range(2):  # the second update does not have the first one's tensors
            transport.begin("0a:1", 0)
            await transport.open(
                {server.url: Target(server, replace(INFO, url=server.url, tp_size=tp_size))}, 5.0
            )
            for bucket in buckets((PARTS[0] | PARTS[1]).items(), 100):
                transport.store(bucket)
                if len(bucket.entries) > 1:
                    bucket.data.zero_()  # its memory is used again; a large tensor has its own
                await transport.send(bucket, 5.0)
            assert await transport.finish(5.0) == Sent()
            seen[:-2] = []

    run_command(update, answer)
    (unload, _), (load, body) = seen
    assert (unload, load) == ("/unload_lora_adapter", "/load_lora_adapter_from_tensors")
    return body


@pytest.mark.parametrize("tp_size", [1, 2])
def test_sglang_gets_all_adapters_in_one_request(tp_size: int) -> None:
    expected = PARTS[0] | PARTS[1]
    body = sent_in_a_request(tp_size)
    assert body["lora_name"] == "policy" and body["load_format"] == "flattened_bucket"
    assert body["config_dict"]["target_modules"] == ["down_proj", "q_proj"]
    assert body["config_dict"]["r"] == 2
    payloads = body["serialized_named_tensors"]
    assert len(payloads) == tp_size and len(set(payloads)) == 1
    content = pickle.loads(base64.b64decode(payloads[0]))
    flat = content["flattened_tensor"]
    received = {
        e.name: flat[e.start_idx : e.end_idx].view(e.dtype).view(e.shape)
        for e in content["metadata"]
    }
    assert received.keys() == {f"base_model.model.{name}" for name in expected}
    assert all(
        torch.equal(received[f"base_model.model.{name}"], expected[name]) for name in expected
    )


def test_a_server_that_takes_no_adapters_in_a_request_is_refused() -> None:
    transport = AdapterTensorTransport(SGLangAPI(), FACTS)
    able = replace(INFO, adapters=True, adapter_tensors=True)
    assert transport.unsupported(able) == ""
    assert "--enable-lora" in transport.unsupported(replace(able, adapters=False))
    assert "sglang.weight_transport to disk" in transport.unsupported(
        replace(able, adapter_tensors=False)
    )
    assert "dp_size 2" in transport.unsupported(replace(able, dp_size=2))
