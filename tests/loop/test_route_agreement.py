"""Tiny models generate, their routes are changed as faulty engines change them, and the next
pass says so or not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_gspo.config import Config
from megatron_gspo.loop.training_loop import train
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.routing_replay.routes import RouteError
from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from megatron_gspo.tracking import read_metrics
from tests.support.collapse_noise import noise_section
from tests.support.distributed import run_distributed
from tests.support.faulty_routes import (
    of_another,
    of_weights,
    outcomes,
    repeated,
    shifted,
    shifted_above,
    shifted_back,
    unchanged,
)
from tests.support.training_runs import WORD, base_config

NAMED = re.compile(
    r"sample (\d+)/(\d+)( \(and \d+ more\))?: routed_experts of tokens? (\d+)( to \d+)? agree with "
)
SIZE = TinyModel(hidden=32, layers=2, experts=16, expert_width=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """``model``, ``other`` with other weights, and ``uniform``, whose routers hardly prefer any
    expert.
    """
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("other", 1), ("uniform", 0)):
        write_tiny_model(folder / name, SIZE, seed=seed, words=[WORD])
    file = folder / "uniform" / "model.safetensors"
    weights = load_file(file)
    flat = {
        name: value * 1e-3 if name.endswith("mlp.gate.weight") else value
        for name, value in weights.items()
    }
    save_file(flat, file, metadata={"format": "pt"})
    return folder


def config(folder: Path, path: str = "model", /, **sections: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "grpo"},
        "routing": {"replay": "r3"},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "max_response_length": 160},
        "training": {"steps": 1, "global_batch_size": 8, "max_tokens_per_micro_batch": 512},
    }
    merged = {
        key: {**defaults.get(key, {}), **sections.get(key, {})} for key in {**defaults, **sections}
    }
    return base_config(str(folder / path), folder / "run", **merged)


def test_each_fault_is_found_and_named(folder):
    faults = {
        "shifted": shifted,
        "shifted back": shifted_back,
        "repeated": repeated,
        "another": of_another,
        "weights": partial(of_weights, str(folder / "other")),
    }
    cases = {f"{name}, longest": (fault, "longest") for name, fault in faults.items()}
    cases |= {f"{name}, all": (faults[name], "all") for name in ("shifted", "another", "weights")}
    ((errors, longest),) = run_distributed(
        outcomes, 1, config(folder), {"none": (unchanged, "all"), **cases}
    )
    assert errors.pop("none") == ""
    for case, error in errors.items():
        match = NAMED.match(error)
        assert match, (case, error)
        assert "longest" not in case or (match[1], match[2], match[3]) == (*longest, None), error
        assert ("shifted by one" in error) == case.startswith("shifted"), error
        assert int(match[4]) <= 10 or case.startswith("repeated"), (
            "the fault begins with the first row"
        )


BF16 = {"model": {"dtype": "bfloat16"}}


def noise(engines: str, strength: float) -> dict[str, dict[str, Any]]:
    return {"routing": noise_section(engines=engines, strength=strength)}


@pytest.mark.parametrize(
    ("path", "sections"),
    [
        ("model", BF16),
        ("model", {**BF16, "rollout": {"max_response_length": 1}}),
        ("model", {"routing": {"replay": "none", "compare_rollout": True}}),
        ("model", {**BF16, "routing": {"replay": "r3", "replay_old_log_probs": False}}),
        ("model", {"algorithm": {"old_log_probs": "rollout"}}),
        ("model", noise("rollout", 1.0)),
        ("uniform", BF16),
        ("uniform", noise("both", 0.3)),
        ("uniform", noise("trainer", 8.0)),
    ],
    ids=str,
)
def test_no_alarm_in_a_healthy_run(folder, path, sections):
    ((errors, _),) = run_distributed(
        outcomes, 1, config(folder, path, **sections), {"none": (unchanged, "all")}
    )
    assert errors == {"none": ""}


def test_shifted_routes_are_found_under_noise(folder):
    plain = config(folder, **noise("both", 0.3))
    ((errors, _),) = run_distributed(outcomes, 1, plain, {"shifted": (shifted, "all")})
    assert "shifted by one" in errors["shifted"]


LAYOUTS = {
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "dp2": {},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_of_a_layout_raises_the_same(folder, name):
    """Also where only the last stage's layers are wrong."""
    cases = {
        "none": (unchanged, "all"),
        "shifted": (shifted, "longest"),
        "upper layers": (shifted_above, "all"),
    }
    (errors, longest), (other, _) = run_distributed(
        outcomes, 2, config(folder, parallel=LAYOUTS[name]), cases
    )
    assert errors == other and errors["none"] == ""
    assert NAMED.match(errors["shifted"]).group(1, 2, 3) == (*longest, None)
    assert ("shifted by one" in errors["upper layers"]) == (name == "pp2")


class Shifts(EmbeddedEngine):
    """Returns the routes one row late."""

    def generate(self, prompts, sampling, *, seed):
        return [
            replace(s, routed_experts=shifted(s, []))
            for s in super().generate(prompts, sampling, seed=seed)
        ]


def stopped(rank: int, world: int, plain: dict[str, Any]) -> str:
    """How a run with this engine ends."""
    made = Config.from_dict(plain)
    tokenizer = AutoTokenizer.from_pretrained(made.model.path, local_files_only=True)
    with pytest.raises(RouteError) as error:
        train(made, engine=Shifts(made.model.path, tokenizer=tokenizer, return_routed_experts=True))
    return str(error.value)


def test_a_run_stops_on_every_rank_before_its_first_update(folder, tmp_path):
    plain = config(folder, evaluation={"at_start": False}) | {"run_dir": str(tmp_path / "run")}
    first, second = run_distributed(stopped, 2, plain)
    assert first == second
    assert NAMED.match(first)
    assert "shifted by one; correct the engine, or train without" in first
    assert read_metrics(tmp_path / "run") == []
