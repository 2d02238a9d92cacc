"""Unknown keys, wrong types and bounds: the one-line error of the first fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import load_config
from tests.config.building import fault


@pytest.mark.parametrize(
    "override, expected",
    [
        ("optimizer.lrr=1", "optimizer.lrr = 1: is not a key; did you mean optimizer.lr?"),
        ("training.lr=1", "training.lr = 1: is not a key; did you mean optimizer.lr?"),
        ("lr=1", "lr = 1: is not a key; did you mean optimizer.lr?"),
        ("trainig.steps=3", 'trainig = {"steps": 3}: is not a key; did you mean training?'),
        ("zzz=1", "zzz = 1: is not a key; remove it, or see docs/config.md for the keys"),
        (
            "training.steps='8'",
            'training.steps = "8": is not allowed; set integer >= 1, without quotes',
        ),
        ("training.steps=8.0", "training.steps = 8.0: is not allowed; set integer >= 1"),
        ("training.steps=true", "training.steps = true: is not allowed; set integer >= 1"),
        ("training.steps=0", "training.steps = 0: is not allowed; set integer >= 1"),
        ("model.dtype=fp32", 'model.dtype = "fp32": is not allowed; set one of float32, bfloat16'),
        (
            "rollout.engine=embeded",
            (
                'rollout.engine = "embeded": is not allowed; set one of embedded, '
                "sglang, vllm, sft, perhaps embedded"
            ),
        ),
        (
            "data.overlong_prompts=cut",
            'data.overlong_prompts = "cut": is not allowed; set one of drop, error',
        ),
        ("optimizer.lr=.nan", "optimizer.lr = NaN: is not allowed; set number > 0"),
        ("tracking.wandb=3", "tracking.wandb = 3: is not allowed; set true or false or string"),
        ("model.path=", "model.path = null: is not allowed; set string"),
        ("parallel=3", "parallel = 3: is not allowed; set a section"),
        (
            "evaluation.pass_at_k=[0]",
            "evaluation.pass_at_k = 0: is not allowed; set list of integers",
        ),
    ],
)
def test_faults_name_key_value_and_fix(file: Path, override: str, expected: str) -> None:
    assert fault(file, override) == expected


def test_missing_key(file: Path, plain: dict) -> None:
    del plain["model"]["path"]
    file.write_text(yaml.safe_dump(plain))
    assert fault(file) == "model.path: is missing; set it: string"


def test_missing_section(file: Path, plain: dict) -> None:
    del plain["training"]
    file.write_text(yaml.safe_dump(plain))
    assert (
        fault(file)
        == "training: is missing; set it: a section with at least steps, global_batch_size"
    )


def test_an_integer_is_a_float(file: Path) -> None:
    assert load_config(file, ["rollout.temperature=1"]).rollout.temperature == 1.0


def test_an_unknown_key_comes_before_the_one_that_it_misses(file: Path, plain: dict) -> None:
    plain["trainig"] = plain.pop("training")
    file.write_text(yaml.safe_dump(plain))
    assert fault(file).endswith("is not a key; did you mean training?")
