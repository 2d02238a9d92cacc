"""What a teacher doesn't go with; see also tests/bad_input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model
from tests.config.building import SFT, assert_refused, build, refused

ON = ("distillation.teacher=teacher", "algorithm.name=gspo_token")
TWO = "distillation.teachers=[{name: math, teacher: a}, {name: code, teacher: b}]"
SOURCES = (
    "data.prompts=null",
    "data.task=null",
    "data.sources=[{name: math, prompts: m.jsonl}, {name: history, prompts: h.jsonl}]",
)
URLS = "distillation.urls=['http://one:30000']"


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (("distillation.top_k=8",), "distillation.top_k = 8", "set that, or remove this"),
        (("distillation.reward_coef=1",), "distillation.reward_coef", "set that, or remove this"),
        ((*ON, "algorithm.name=gspo"), "distillation.teacher", "set algorithm.name: gspo_token"),
        ((*ON, "algorithm.name=gmpo"), "distillation.teacher", "set algorithm.name: gspo_token"),
        ((*SFT, ON[0]), "distillation.teacher", "gspo_token, or remove the key"),
        ((*ON, "distillation.engine=vllm"), "distillation.engine", "set that, or remove this"),
        ((*ON, URLS, "distillation.top_k=all"), "distillation.top_k", "remove distillation.urls"),
        ((*ON, "distillation.top_k=all", "training.ppo_epochs=2"), "distillation.top_k", "32"),
        (
            (TWO, ON[1], "distillation.teacher_field=x", "distillation.top_k=all"),
            "distillation.top_k",
            "set a number",
        ),
        ((*ON, URLS, "rollout.temperature=0.8"), "rollout.temperature", "set it to 1"),
        ((*ON, "distillation.urls=['http://']"), "distillation.urls", "write http://host:port"),
        ((*ON, TWO), "distillation.teacher = ", "move it into distillation.teachers"),
        ((TWO, ON[1], URLS), "distillation.urls", "move it into distillation.teachers"),
        ((TWO, ON[1]), "distillation.teacher_field = null", "or name the data.sources"),
        ((TWO, ON[1], *SOURCES), "distillation.teacher_field = null", "name it as its teacher"),
        ((TWO, "algorithm.name=gspo"), 'distillation.teachers = ["math", "code"]', "gspo_token"),
        ((*ON, "distillation.teacher_field=x"), "distillation.teacher_field", "or remove this"),
        (
            (ON[1], "distillation.teachers=[{name: a, teacher: b}, {name: a, teacher: c}]"),
            'distillation.teachers.name = "a"',
            "rename one of them",
        ),
        (
            (ON[1], "distillation.teachers=[{name: a/b, teacher: b}]"),
            'distillation.teachers.name = "a/b"',
            "use letters, digits, - and _",
        ),
        (
            (
                ON[1],
                "distillation.teacher_field=x",
                "distillation.teachers=[{name: a, teacher: b, engine: vllm}]",
            ),
            "distillation.teachers.a.engine",
            "set that, or remove this",
        ),
    ],
)
def test_refused_choices(plain: dict, overrides: tuple[str, ...], key: str, fix: str) -> None:
    assert_refused(plain, overrides, key, fix)


@pytest.mark.parametrize("name", ["gspo_token", "grpo", "dapo", "cispo"])
def test_a_teacher_beside_an_objective(plain: dict, name: str) -> None:
    config = build(plain, *ON, f"algorithm.name={name}", "distillation.top_k=32")
    assert config.distillation.is_on


def test_several_teachers(plain: dict) -> None:
    config = build(plain, TWO, ON[1], "distillation.teacher_field=subject")
    assert list(config.distillation.by_name) == ["math", "code"]
    assert config.distillation.is_on


def test_one_response_to_a_prompt_is_enough_without_a_reward(plain: dict) -> None:
    size = plain["rollout"]["rollout_batch_size"]
    single = ("rollout.n_samples_per_prompt=1", f"training.global_batch_size={size}")
    build(plain, *ON, *single)
    message = refused(plain, *ON, *single, "distillation.reward_coef=1")
    assert message.startswith("rollout.n_samples_per_prompt = 1")


def test_the_teacher_scores_every_id_of_the_policy(plain: dict, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "policy", TinyModel(layers=1, experts=2))
    write_tiny_model(tmp_path / "teacher", TinyModel(layers=2, experts=2))
    on = (
        ON[1],
        f"model.path={tmp_path / 'policy'}",
        f"distillation.teacher={tmp_path / 'teacher'}",
    )
    build(plain, *on).check_sizes(1)
    message = refused(plain, *on, "distillation.top_k=1000000", world_size=1)
    assert message.startswith("distillation.top_k = 1000000: the policy has")
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 5}))
    message = refused(plain, *on, world_size=1)
    assert message.startswith("distillation.teacher") and "has a vocabulary of 5" in message
