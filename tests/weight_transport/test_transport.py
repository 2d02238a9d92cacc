"""What every weight transport has from its base class."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from megatron_gspo.servers.http_client import ServerError
from megatron_gspo.weight_transport.transport import Target, WeightTransport
from tests.weight_transport.test_weight_update import INFO

NONE: Any = None


def test_a_server_that_fails_gets_no_further_steps():
    transport = WeightTransport(NONE)
    seen = []
    targets = {url: Target(NONE, replace(INFO, url=url)) for url in ("http://a:1", "http://b:1")}

    async def step(target: Target) -> None:
        seen.append(target.info.url)
        if target.info.url == "http://a:1":
            raise ServerError("refused", status=400, retry=False)

    async def run() -> None:
        await transport.open(targets, 1.0)
        await transport.on_each(step)
        await transport.on_each(step)

    asyncio.run(run())
    assert seen == ["http://a:1", "http://b:1", "http://b:1"] and not transport.is_over
    assert {url: str(error) for url, error in transport.failures.items()} == {
        "http://a:1": "refused"
    }
