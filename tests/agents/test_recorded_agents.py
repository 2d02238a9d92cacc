"""Requests that real agents have sent, one row for each conversation.

Recorded at this endpoint; long texts are shortened to their beginning and a checksum. The replies
are drawn again, so that the ids in the requests are of other replies: histories are recognised by
their content.
"""

import json
from pathlib import Path

import pytest

from megatron_gspo.agents.rendering import PackageRendering
from tests.support.agent_endpoint import TOKENIZER, in_event_loop, serving

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("renderer", [None, "qwen3"])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
@in_event_loop
async def test_recorded_requests(file: Path, renderer: str | None) -> None:
    """renderer: of the optional package; None: the chat template."""
    rendering = None
    if renderer is not None:
        pytest.importorskip("renderers")
        rendering = PackageRendering(TOKENIZER, renderer)
    recorded = json.loads(file.read_text(encoding="utf-8"))
    replies = iter(recorded["replies"])
    async with serving(lambda prompt, seed: next(replies), rendering=rendering) as served:
        for request in recorded["requests"]:
            url = f"{served.endpoint.base_url(served.run)}/{request['path']}"
            headers = {"Authorization": f"Bearer {served.run.key}"}
            async with served.session.post(url, json=request["body"], headers=headers) as response:
                assert response.status == 200, await response.text()
                await response.read()
        turns = len(recorded["requests"]) // recorded["conversations"]
        assert [len(row.turns) for row in served.rows] == [turns] * recorded["conversations"]
        served.check_rows()
        assert not any(name.startswith("breaks") for name in served.run.tree.counts)
