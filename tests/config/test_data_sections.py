"""What the section `data` resolves to."""

from __future__ import annotations

from megatron_gspo.config import DataConfig, TaskConfig
from megatron_gspo.config.code_section import CodeConfig

TASK = TaskConfig(name="chain_sum")


def test_the_verifier_follows_the_prompts_unless_it_is_set() -> None:
    assert DataConfig(prompts="a.jsonl").resolved_verifier == "exact_match"
    assert DataConfig(task=TASK).resolved_verifier == "reasoning_gym"
    assert DataConfig(task=TASK, verifier="mine.py:score").resolved_verifier == "mine.py:score"


def test_held_out_prompts_are_a_file_or_of_the_task() -> None:
    assert not DataConfig(prompts="a.jsonl").has_eval_prompts
    assert DataConfig(prompts="a.jsonl", eval_prompts="b.jsonl").has_eval_prompts
    assert DataConfig(task=TASK).has_eval_prompts
    assert not DataConfig(task=TaskConfig(name="chain_sum", eval_size=0)).has_eval_prompts


def test_the_tests_of_a_response_end_before_the_verifier_is_killed() -> None:
    code = CodeConfig(time_limit=2.0, score="fraction")
    options = DataConfig(
        verifier="code", verifier_timeout=30.0, code=code
    ).resolved_verifier_options
    assert options["time_budget"] == 22.0  # the last program may take 7 s more
    assert options["score"] == "fraction" and options["time_limit"] == 2.0
    assert DataConfig(verifier_options={"style": "boxed"}).resolved_verifier_options == {
        "style": "boxed"
    }
