"""The servers' log-probs against the trainer's: metrics, warning and error."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config
from megatron_gspo.errors import SharedEngineError
from megatron_gspo.loop import log_prob_check
from megatron_gspo.loop.log_prob_check import check_log_probs, compare
from megatron_gspo.loop.timers import Timers
from tests.support.samples import make_prompt
from tests.support.training_runs import base_config

PROMPTS = [make_prompt(i, text="abc") for i in range(6)]


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_worst_server_is_named():
    ours = [array(-1, -2), array(-3)]
    theirs = {"a": [array(-1, -2.5), array(-3)], "b": [array(-1, -2), array(-4)]}
    assert compare(ours, theirs) == (pytest.approx(1.5 / 6), 1.0, "b")


def test_a_nan_is_the_worst():
    mean, largest, server = compare([array(-1)], {"a": [array(float("nan"))], "b": [array(-9)]})
    assert math.isnan(mean) and math.isnan(largest) and server == "a"


def checked(monkeypatch, difference: float, version: int = 4, servers: int = 1, **sglang: Any) -> dict[str, float]:
    """The metrics of a check every 2 updates, with servers that differ by so much."""
    ours = SimpleNamespace(log_probs={i: array(-1, -1) for i in range(4)})
    monkeypatch.setattr(log_prob_check, "compute_log_probs", lambda *args, **options: ours)
    monkeypatch.setattr(log_prob_check, "values_everywhere", lambda found, batch, groups: list(found.values()))
    monkeypatch.setattr(log_prob_check.dist, "get_rank", lambda: 0)
    asked = []

    def score(sequences):
        asked.append(len(sequences))
        return {f"http://{i}": [array(-1, -1 - difference)] * 4 for i in range(servers)}

    config = base_config("model", "run", rollout={"engine": "sglang"},
                         sglang={"urls": ["http://a:1"], "log_prob_check_interval": 2, **sglang})  # fmt: skip
    timers = Timers()
    source = SimpleNamespace(score=score)
    found = check_log_probs(source, SimpleNamespace(groups=None), PROMPTS, Config.from_dict(config), version, timers)
    assert asked == ([4] if version % 2 == 0 else [])
    assert ("time/log_prob_check" in timers.take()) == (version % 2 == 0)
    return found


def test_every_so_many_updates(monkeypatch):
    assert checked(monkeypatch, 0.25) == {"log_prob_check/abs_diff": 0.125, "log_prob_check/abs_diff_max": 0.25}
    assert checked(monkeypatch, 0.25, version=3) == {}
    assert checked(monkeypatch, 0.25, servers=0) == {}


@pytest.mark.parametrize("difference", [0.75, float("nan")])
def test_above_the_tolerance(monkeypatch, capsys, difference):
    shown = f"differs by {difference:.3g} nats between the trainer and server http://0"
    with pytest.raises(SharedEngineError, match=shown):
        checked(monkeypatch, difference)
    found = checked(monkeypatch, difference, log_prob_check_action="warn")
    assert shown in capsys.readouterr().err and set(found) == {"log_prob_check/abs_diff", "log_prob_check/abs_diff_max"}
