import json

import pytest

from megatron_gspo.config import TaskConfig
from megatron_gspo.data.prompts import PromptError
from megatron_gspo.data.tasks import load_task
from megatron_gspo.rewards.verifiers import load_verifier
from tests.support.samples import CharTokenizer

pytest.importorskip("reasoning_gym")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def load(**chosen):
    spec = {"name": "chain_sum", "kwargs": SMALL, "size": 200, "eval_size": 40, "seed": 0}
    return load_task(TaskConfig(**(spec | chosen)), CharTokenizer())


def texts(prompt_set):
    return [prompt.text for prompt in prompt_set.prompts]


def test_training_and_held_out_questions_are_disjoint():
    # one-digit sums: 200 draws from under 200 distinct questions, so that an overlap is certain
    task = load()
    held_out = texts(task.evaluation)
    trained = texts(task.train)
    assert len(held_out) == len(set(held_out)) == 40
    assert task.overlap > 0 and len(trained) == 200 - task.overlap
    assert not set(held_out) & set(trained)
    assert [prompt.index for prompt in task.train.prompts] == list(range(len(trained)))


def test_generation_depends_on_the_seed_alone_and_held_out_not_on_the_size():
    assert texts(load().train) == texts(load().train)
    assert texts(load(seed=1).train) != texts(load().train)
    assert texts(load(size=50).evaluation) == texts(load().evaluation)


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "countdown", "arc_agi"])
def test_the_reference_answer_scores_1_and_a_wrong_one_less(name):
    task = load_task(TaskConfig(name=name, size=3, eval_size=0), CharTokenizer())
    verifier = load_verifier("reasoning_gym")
    assert task.evaluation is None
    for prompt in task.train.prompts:
        json.dumps(prompt.metadata, allow_nan=False)
        answer = prompt.metadata["reasoning_gym"]["entry"]["answer"]
        if name != "countdown":
            assert prompt.answer == answer
        assert verifier(f" {prompt.answer}\n", prompt) == 1.0
        assert verifier("no idea", prompt) < 1.0


def test_answer_styles_and_partial_credit():
    prompt = load(size=1, eval_size=0).train.prompts[0]
    boxed = load_verifier("reasoning_gym", {"style": "boxed"})
    assert boxed(f"so \\boxed{{{prompt.answer}}}", prompt) == 1.0
    assert boxed(f"so {prompt.answer}", prompt) == 0.0
    wordy = (  # reasoning-gym gives a part of the score for an answer inside other text
        f"{prompt.answer} it is"
    )
    assert 0 < load_verifier("reasoning_gym")(wordy, prompt) < 1
    assert load_verifier("reasoning_gym", {"partial_credit": False})(wordy, prompt) == 0.0


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"name": "chain_sums"},
            "task 'chain_sums' is unknown to reasoning-gym; use one of chain_sum",
        ),
        (
            {"kwargs": {"min_termz": 2}},
            "task chain_sum: kwargs .* refused .*min_termz.*; correct them",
        ),
        (
            {"kwargs": {"min_terms": -1}},
            "task chain_sum: kwargs .* refused .min_terms must be positive",
        ),
        (
            {"eval_size": 2000},
            "eval_size is 2000 but only [0-9]+ distinct questions were drawn; lower it",
        ),
        ({"size": 1, "eval_size": 150}, "all 1 training questions are held out; lower eval_size"),
    ],
)
def test_bad_tasks(chosen, message):
    with pytest.raises(PromptError, match=message):
        load(**chosen)
