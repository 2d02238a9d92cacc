"""The doctor with a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.tools.doctor.server_checks import check_startable, judge_server, query_servers
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
    [answer] = query_servers(config).values()
    findings = judge_server(config, sglang_url, answer)
    version, cpu, startable = check_startable(
        config_of(sglang_model, tmp_path, num_servers=1, python=sglang_python)
    )
    assert cpu and [f.level for f in startable] == ["ok"]
    assert [(f.level, f.check) for f in findings] == [
        ("ok", "versions.sglang"),
        ("ok", "servers.answer"),
    ]
    assert "cpu, TP 1, PP 1, DP 1" in findings[1].what
    assert numbers(answer.version) == version  # type: ignore[union-attr]


def test_a_real_server_that_is_too_small(sglang_model, sglang_url, tmp_path):
    config = config_of(sglang_model, tmp_path, urls=[sglang_url])
    long = replace(config, rollout=replace(config.rollout, max_response_length=9000))
    [answer] = query_servers(long).values()
    [_, fault] = judge_server(long, sglang_url, answer)
    assert fault.level == "error" and "holds sequences of at most" in fault.what
