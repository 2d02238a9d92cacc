"""What the section `data` resolves to."""

from __future__ import annotations

from megatron_gspo.config import DataConfig, SourceConfig, TaskConfig
from megatron_gspo.config.code_section import CodeConfig


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


def test_a_source_has_its_own_keys_and_those_of_the_section() -> None:
    words = SourceConfig(name="words", task=TaskConfig(name="spell_backward"))
    maths = SourceConfig(
        name="maths",
        prompts="maths.jsonl",
        answer_key="solution",
        verifier="math_verify",
        verifier_options={"style": "boxed"},
        eval_prompts="test.jsonl",
    )
    data = DataConfig(sources=(words, maths), max_prompt_length=99, verifier_timeout=3.0)
    assert list(data.by_source) == ["words", "maths"]
    of_words, of_maths = data.by_source.values()
    assert of_words.resolved_verifier == "reasoning_gym" and of_words.prompt_paths == ()
    assert (of_maths.resolved_verifier, of_maths.answer_key) == ("math_verify", "solution")
    assert of_maths.resolved_verifier_options == {"style": "boxed"}
    assert of_maths.prompt_paths == ("maths.jsonl",) and of_maths.sources == ()
    assert {source.max_prompt_length for source in data.by_source.values()} == {99}
    assert data.given_verifiers == {"data.sources.maths.verifier": "math_verify"}
    assert data.has_eval_prompts and not DataConfig(prompts="a").has_eval_prompts
    alone = DataConfig(prompts="a")
    assert alone.by_source == {"": alone}


def test_one_verifier_for_all_sources() -> None:
    sources = (
        SourceConfig(name="a", prompts="a", verifier="judge", verifier_timeout=99.0),
        SourceConfig(name="b", prompts="b", verifier_options={"style": "tag"}, answer_key="x"),
    )
    data = DataConfig(sources=sources).with_verifier("math_verify", {"style": "boxed"}, 5.0)
    for source, answer_key in zip(data.by_source.values(), ("answer", "x"), strict=True):
        assert source.resolved_verifier == "math_verify" and source.verifier_timeout == 5.0
        assert source.resolved_verifier_options == {"style": "boxed"}
        assert source.answer_key == answer_key
