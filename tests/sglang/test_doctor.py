"""The doctor with a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.tools.doctor.server_checks import check_startable, judge_servers, query_servers
from megatron_gspo.tools.doctor.version_checks import numbers
from tests.support.command_line import small_config


def config_of(model: str, folder: Path, **sglang: Any) -> Config:
    sections = {"rollout": {"engine": "sglang"}, "sglang": sglang, "routing": {"replay": "r3"}}
    content = small_config(model, folder)
    return Config.from_dict(
        content | {name: {**content.get(name, {}), **more} for name, more in sections.items()}
    )


def test_a_real_server_can_serve(sglang_model, sglang_url, sglang_python, tmp_path):
    config = config_of(sglang_model, tmp_path, urls=[sglang_url])
    found = judge_servers(config, query_servers(config))
    version, cpu, startable = check_startable(
        config_of(sglang_model, tmp_path, num_servers=1, python=sglang_python)
    )
    assert cpu and [f.level for f in startable] == ["ok"]
    # And then returns wrong routes on a CPU, unless an argument prevents it.
    overlaps = version < (0, 5, 23)
    second = ("warning", "servers.routes") if overlaps else ("ok", "servers.answer")
    assert [(f.level, f.check) for f in found] == [("ok", "versions.sglang"), second]
    assert overlaps or "cpu, TP 1, PP 1, DP 1" in found[1].what
    answers = query_servers(config).values()
    assert numbers(next(answer.version for answer in answers)) == version  # type: ignore[union-attr]


def test_a_real_server_that_is_too_small(sglang_model, sglang_url, tmp_path):
    config = config_of(sglang_model, tmp_path, urls=[sglang_url])
    long = replace(config, rollout=replace(config.rollout, max_response_length=9000))
    assert [f.check for f in judge_servers(long, query_servers(long)) if f.level == "error"] == [
        "servers.length"
    ]
