"""Prompts, their format and the verifier: choices that contradict each other, and files that
are missing.
"""

from __future__ import annotations

import pytest

from tests.config.building import ENVIRONMENT, assert_refused, build, refused

NO_TASK = ["data.task=null", "data.verifier=null"]


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["data.task=null"], "data.prompts = null:", "set one"),
        (["data.prompts=x.jsonl"], 'data.prompts = "x.jsonl":', "set one"),
        (
            ["data.task=null", "data.prompts=x", "data.verifier=reasoning_gym"],
            "data.verifier =",
            "data.task",
        ),
        (["data.verifier=regex"], 'data.verifier = "regex":', "path/to/file.py:function"),
        (["data.verifier=rewards.py:2x"], "data.verifier =", "path/to/file.py:function"),
        (["data.verifier=a-b:c"], "data.verifier =", "package.module:function"),
        (
            ["data.task=null", "data.prompts=x", "data.answer_key=null"],
            "data.answer_key = null:",
            "name",
        ),
        (["data.verifier=code"], "data.verifier_timeout = 10.0:", "set at least 39,"),
        (
            ["data.verifier=code", "data.verifier_timeout=null"],
            "data.verifier_timeout = null:",
            "set at least 39,",
        ),
        (
            ["data.verifier=code", "data.verifier_timeout=98", "data.code.language=cpp"],
            "data.verifier_timeout",
            "99",
        ),
        (
            ["data.verifier=code", "data.verifier_options={a: 1}"],
            "data.verifier_options",
            "the keys of data.code",
        ),
        (
            [
                "data.verifier=code",
                "data.verifier_timeout=39",
                "data.code.sandbox_url='http://me:secret@host/run'",
            ],
            'data.code.sandbox_url = "host/run":',
            "http://host:port",
        ),
        (["data.verifier=judge"], "data.verifier_timeout = 10.0:", "set at least 65,"),
        (
            [
                "data.verifier=judge_ranking",
                "data.verifier_timeout=null",
                "data.verifier_options={request_timeout: 20}",
            ],
            "data.verifier_timeout = null:",
            "set at least 25,",
        ),
        (
            ["data.verifier=judge", "data.verifier_options={request_timeout: 20s}"],
            'data.verifier_options.request_timeout = "20s":',
            "set one above 0",
        ),
        (["data.verifier=reward_model"], "data.verifier_timeout = 10.0:", "set it to null"),
        (
            ["evaluation.verifier=regex"],
            'evaluation.verifier = "regex":',
            "path/to/file.py:function",
        ),
        (["evaluation.verifier=code"], "evaluation.verifier_timeout = 10.0:", "set at least 39,"),
        (
            ["evaluation.verifier=reward_model"],
            "evaluation.verifier_timeout = 10.0:",
            "set it to null",
        ),
        (
            [
                *NO_TASK,
                "data.sources=[{name: a, prompts: x, eval_prompts: y, verifier: judge,"
                " verifier_timeout: 99, answer_key: null}]",
                "data.answer_key=null",
                "evaluation.verifier=exact_match",
            ],
            "data.sources.a.answer_key = null:",
            "name the field",
        ),
        (["data.prompt_template='Q:'"], "data.prompt_template =", "{question}"),
        (["data.system_prompt=Hi"], "data.system_prompt =", "data.chat_template: true"),
        (
            ["data.sources=[{name: a, prompts: x.jsonl}]"],
            "data.task =",
            "move it into a source",
        ),
        (
            [*NO_TASK, "data.sources=[{name: a/b, prompts: x.jsonl}]"],
            'data.sources.name = "a/b": is no name',
            "use letters",
        ),
        (
            [*NO_TASK, "data.sources=[{name: a, prompts: x}, {name: a, prompts: y}]"],
            'data.sources.name = "a": names two sources',
            "rename one",
        ),
        ([*NO_TASK, "data.sources=[{name: a}]"], "data.sources.a.prompts = null:", "set one"),
        (
            [*NO_TASK, "data.sources=[{name: a, prompts: x, weight: 0}]"],
            "data.sources.0.weight = 0",
            "> 0",
        ),
        (
            [*NO_TASK, "data.sources=[{name: a, prompts: x, verifier: regex}]"],
            'data.sources.a.verifier = "regex":',
            "path/to/file.py:function",
        ),
        (
            [
                *NO_TASK,
                "data.sources=[{name: a, prompts: x, verifier: exact_match}]",
                "rollout.environment=my.py:Game",
            ],
            "data.sources.a.verifier =",
            "remove one",
        ),
        (
            [
                *NO_TASK,
                "data.sources=[{name: a, prompts: x, verifier: exact_match}]",
                "agents.function=my.py:run",
            ],
            "data.sources.a.verifier =",
            "set data.verifier",
        ),
    ],
)
def test_contradictions_are_refused_at_load(
    plain: dict, overrides: list[str], key: str, fix: str
) -> None:
    assert_refused(plain, overrides, key, fix)


@pytest.mark.parametrize("rewards", ["agents.function=my.py:run", ENVIRONMENT])
def test_no_reference_answers_where_agents_or_an_environment_give_the_rewards(
    plain: dict, rewards: str
) -> None:
    config = build(plain, *NO_TASK, "data.prompts=x.jsonl", "data.answer_key=null", rewards)
    assert config.data.answer_key is None


def test_a_missing_file_of_the_verifier_of_held_out_responses(plain: dict) -> None:
    message = refused(plain, "evaluation.verifier=nowhere.py:score", world_size=4)
    assert message.startswith("evaluation.verifier =") and "no such file: nowhere.py" in message
