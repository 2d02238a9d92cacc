"""The servers' log-probs against the trainer's: metrics, warning and error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_gspo.config import Config
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop import log_prob_check
from megatron_gspo.loop.log_prob_check import check_log_probs, compare
from megatron_gspo.loop.timers import Timers
from tests.support.model_server import ModelServer, tied_model
from tests.support.samples import make_prompt
from tests.support.training_runs import base_config, launch, records, tiny_model

PROMPTS = [make_prompt(i, text="abc") for i in range(6)]


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_worst_server_is_named():
    ours = [array(-1, -2), array(-3)]
    theirs = {"a": [array(-1, -2.5), array(-3)], "b": [array(-1, -2), array(-4)]}
    assert compare(ours, theirs) == (pytest.approx(1.5 / 6), 1.0, "b")


def checked(
    monkeypatch, difference: float, version: int = 4, servers: int = 1, **sglang: Any
) -> dict[str, float]:
    """The metrics of a check every 2 updates, with servers that differ by so much."""
    ours = SimpleNamespace(log_probs=array(*[-1.0] * 8))
    monkeypatch.setattr(log_prob_check, "compute_log_probs", lambda *args, **options: ours)
    monkeypatch.setattr(log_prob_check, "values_everywhere", lambda column, groups: column)
    monkeypatch.setattr(log_prob_check.dist, "get_rank", lambda: 0)
    asked = []

    def score(sequences):
        asked.append(len(sequences))
        return {f"http://{i}": [array(-1, -1 - difference)] * 4 for i in range(servers)}

    config = base_config(
        "model",
        "run",
        rollout={"engine": "sglang"},
        sglang={"urls": ["http://a:1"], "log_prob_check_interval": 2, **sglang},
    )
    timers = Timers()
    source = SimpleNamespace(score=score)
    metrics = check_log_probs(
        source, SimpleNamespace(groups=None), PROMPTS, Config.from_dict(config), version, timers
    )
    assert asked == ([4] if version % 2 == 0 else [])
    assert ("time/log_prob_check" in timers.read_and_reset()) == (version % 2 == 0)
    return metrics


def test_every_so_many_updates(monkeypatch):
    assert checked(monkeypatch, 0.25) == {
        "log_prob_check/abs_diff": 0.125,
        "log_prob_check/abs_diff_max": 0.25,
    }
    assert checked(monkeypatch, 0.25, version=3) == {}
    assert checked(monkeypatch, 0.25, servers=0) == {}


@pytest.mark.parametrize("difference", [0.75, float("nan")])
def test_above_the_tolerance(monkeypatch, capsys, difference):
    shown = f"differs by {difference:.3g} nats between the trainer and server http://0"
    with pytest.raises(SharedEngineError, match=shown):
        checked(monkeypatch, difference)
    metrics = checked(monkeypatch, difference, log_prob_check_action="warn")
    assert shown in capsys.readouterr().err
    assert set(metrics) == {
        "log_prob_check/abs_diff",
        "log_prob_check/abs_diff_max",
    }


def other(
    ours: list[np.ndarray], theirs: list[np.ndarray], dtype: str = "bfloat16", **sections: Any
) -> str | None:
    sections = {"rollout": {"engine": "sglang"}, "sglang": {"urls": ["http://a:1"]}, **sections}
    config = base_config(str(sections.pop("model", "model")), "run", **sections)
    config["model"]["dtype"] = dtype
    return log_prob_check.other_model(ours, {"http://a:1": theirs}, Config.from_dict(config))


@pytest.mark.parametrize(
    ("dtype", "difference", "sections"),
    [
        ("float32", 2e-5, {}),  # the most that the engines' tests allow
        ("float32", 0.03, {}),  # its servers compute in bfloat16
        ("bfloat16", 0.032, {}),  # the largest means that were measured
        (
            "bfloat16",
            0.17,
            {"rollout": {"engine": "sglang", "quantization": {"format": "fp8_block"}}},
        ),
    ],
)
def test_rounding_is_not_another_model(tmp_path, dtype, difference, sections):
    """Also where single tokens are far off, as in a mixture of experts, whose experts flip."""
    if sections:
        sections = {**sections, "model": tiny_model(tmp_path)}
    generator = np.random.default_rng(0)
    ours = [np.float32(-generator.exponential(2.0, size=30)) for _ in range(4)]
    theirs = [a + np.float32(generator.laplace(0.0, difference, size=30)) for a in ours]
    theirs[0][3] -= 1.4
    assert other(ours, theirs, dtype, **sections) is None


def test_prompts_that_are_certain_are_not_another_model():
    """The log-probs are all the same, so that rounding is more than all of their differences."""
    ours = [array(-1e-6, -1e-6, -2e-6)]
    theirs = [array(-0.02, -0.04, -0.001)]
    assert other(ours, theirs) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_or_zero_output_layer_is_another_model(tmp_path, dtype):
    generator = np.random.default_rng(0)
    ours = [np.float32(-generator.exponential(2.0, size=30)) for _ in range(4)]
    for theirs in (
        [np.full(30, -math.log(151_936), np.float32) for _ in ours],
        [np.float32(-math.log(151_936) + generator.normal(size=30)) for _ in ours],
        [np.full(30, np.nan, np.float32) for _ in ours],
        [np.full(30, -np.inf, np.float32) for _ in ours],
    ):
        line = other(ours, theirs, dtype, model=tiny_model(tmp_path))
        assert line is not None
        assert line.startswith("server http://a:1 computes another model than the trainer")
        assert "sglang.log_prob_check_at_start: false" in line


@pytest.mark.parametrize(
    ("model_type", "tied", "advice"),
    [
        (
            "qwen3_moe",
            True,
            "SGLang ignores tie_word_embeddings of qwen3_moe (sgl-project/sglang#19908)",
        ),
        ("qwen3_next", True, "SGLang ignores tie_word_embeddings of qwen3_next"),
        ("qwen3_moe", False, "compare config.json and arguments of the servers with model.path"),
        ("qwen3", True, "compare config.json"),
    ],
)
def test_the_advice_fits_the_model(tmp_path, model_type, tied, advice):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "tie_word_embeddings": tied})
    )
    line = other([array(-1, -2, -3)], [array(-12, -12, -12)], model=tmp_path)
    assert line is not None and advice in line and "\n" not in line


def test_a_run_is_compared_at_its_start_and_after_its_first_update(tmp_path):
    """`tests/bad_input` has the server that computes another model."""
    model = tied_model(tmp_path / "model", tied=True)
    with ModelServer(model, ignores_ties=False) as server:
        config = base_config(
            model,
            tmp_path / "run",
            rollout={"engine": "sglang"},
            training={"steps": 2},
            sglang={"urls": [server.url], "weight_transport": "disk"},
        )
        launch(config)
    differences = [
        record.get("log_prob_check/abs_diff_max") for record in records(tmp_path / "run")
    ]
    assert differences[-2] < 2e-5 and differences[-1] is None
    assert server.scored == 8


def test_the_check_at_the_start_can_be_turned_off(monkeypatch):
    ours = SimpleNamespace(log_probs=array(*[-1.0] * 8))
    monkeypatch.setattr(log_prob_check, "compute_log_probs", lambda *args, **options: ours)
    monkeypatch.setattr(log_prob_check, "values_everywhere", lambda column, groups: column)
    source = SimpleNamespace(score=lambda sequences: {"http://a:1": [array(-1, -1)] * 4})
    policy = SimpleNamespace(groups=None)
    for on, version, at_start, due in [
        (True, 0, True, True),
        (True, 7, True, True),  # of a resumed run
        (True, 1, False, True),
        (True, 2, False, False),
        (False, 0, True, False),
        (False, 1, False, False),
    ]:
        sglang = {"urls": ["http://a:1"], "log_prob_check_at_start": on}
        config = Config.from_dict(
            base_config("model", "run", rollout={"engine": "sglang"}, sglang=sglang)
        )
        metrics = check_log_probs(
            source, policy, PROMPTS, config, version, Timers(), at_start=at_start
        )
        assert bool(metrics) == due, (on, version, at_start)


def test_prompts_of_one_token_are_not_compared():
    config = Config.from_dict(
        base_config("model", "run", rollout={"engine": "sglang"}, sglang={"urls": ["http://a:1"]})
    )
    prompts = [make_prompt(i, text="a") for i in range(3)]
    source = SimpleNamespace(score=None)
    assert (
        check_log_probs(source, SimpleNamespace(), prompts, config, 0, Timers(), at_start=True)
        == {}
    )


def test_the_page_s_way_to_untie_a_model(tmp_path, monkeypatch):
    tied_model(tmp_path / "tied", tied=True)
    page = Path(__file__).parents[2] / "docs" / "sglang.md"
    code = page.read_text(encoding="utf-8").split("```py\n", 1)[1].split("```", 1)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {})
    weights = load_file(tmp_path / "untied" / "model.safetensors")
    assert weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])
    assert (
        json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    with ModelServer(str(tmp_path / "untied"), ignores_ties=True) as server:
        config = base_config(
            "untied",
            tmp_path / "run",
            rollout={"engine": "sglang"},
            training={"steps": 1},
            sglang={"urls": [server.url], "weight_transport": "disk"},
        )
        launch(config)
    assert server.scored == 8
