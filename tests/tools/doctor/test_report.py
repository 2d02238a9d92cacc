"""Findings as text and as JSON."""

from __future__ import annotations

import io
import json

from megatron_gspo.tools.doctor.findings import (
    Finding,
    ok,
)
from megatron_gspo.tools.doctor.report import document, write_json, write_text
from tests.support.findings import ERROR, WARNING


def test_piped_text_is_plain_and_each_finding_one_line():
    long = ok("run.start", "word " * 100 + "\nsecond line")
    stream = io.StringIO()
    write_text([long, WARNING], stream)
    first, second, summary = stream.getvalue().splitlines()
    assert first.startswith("ok       run.start  word word") and first.endswith("second line")
    assert second == "warning  run.start  1 GiB free; it fills up; free some"
    assert summary == "1 warning, 1 ok: it can start; read the warnings first"
    assert "\x1b" not in stream.getvalue()


def test_json_is_one_document():
    stream = io.StringIO()
    write_json(document([ERROR], world_size=2, config="a.yaml", code=2), stream)
    content = json.loads(stream.getvalue())
    assert (content["format"], content["worst"], content["exit_code"], content["world_size"]) == (
        1,
        "error",
        2,
        2,
    )
    assert Finding(**{**content["findings"][0], "ranks": ()}) == ERROR
