import numpy as np
import pytest

from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.verifiers import VerifierError, load_verifier
from megatron_gspo.rewards.worker import Reply, run_verifier
from tests.support.samples import make_prompt

USERS = """
from dataclasses import dataclass
@dataclass
class Weight:
    value: float = 2.0
def length(text, prompt, scale=1.0):
    return scale * Weight().value * len(text)
number = 3
"""


def test_exact_match():
    verifier = load_verifier("exact_match")
    assert verifier(" 4 ", make_prompt(answer="4\n")) == 1.0
    assert verifier("5", make_prompt()) == 0.0
    assert load_verifier("exact_match", {"style": "hash"})("4", make_prompt()) == 0.0
    with pytest.raises(ValueError, match="prompt 0 has no answer; set answer_key"):
        verifier("4", make_prompt(answer=None))
    with pytest.raises(ValueError, match="prompt 0 is not from a reasoning-gym task"):
        load_verifier("reasoning_gym")("4", make_prompt())


def test_a_users_function_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_verifiers.py").write_text(USERS)
    from_file = load_verifier(f"{tmp_path}/my_verifiers.py:length")
    assert from_file("abc", make_prompt()) == 6.0
    assert (
        load_verifier(f"{tmp_path}/my_verifiers.py:length", {"scale": 0.5})("abc", make_prompt())
        == 3.0
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_verifier("my_verifiers:length")("ab", make_prompt()) == 4.0


def test_a_file_imports_its_neighbours_also_of_the_same_names(tmp_path):
    verifiers = []
    for name, reward in (("one", 1.0), ("two", 2.0)):
        folder = tmp_path / name
        (folder / "shared").mkdir(parents=True)
        (folder / "helpers.py").write_text(f"REWARD = {reward}\n")
        (folder / "shared" / "__init__.py").write_text("")
        (folder / "shared" / "lazy.py").write_text(f"EXTRA = {10 * reward}\n")
        (folder / "verifier.py").write_text(
            "import helpers\n"
            "def score(text, prompt):\n"
            "    from shared import lazy\n"
            "    return helpers.REWARD + lazy.EXTRA\n"
        )
        verifiers.append(load_verifier(f"{folder}/verifier.py:score"))
    assert [verifier("", make_prompt()) for verifier in verifiers] == [11.0, 22.0]
    assert [verifier("", make_prompt()) for verifier in reversed(verifiers)] == [22.0, 11.0]


def test_a_file_in_a_package_imports_from_it(tmp_path):
    inner = tmp_path / "rewards_of_mine" / "mathematics"
    inner.mkdir(parents=True)
    (tmp_path / "rewards_of_mine" / "__init__.py").write_text("")
    (tmp_path / "rewards_of_mine" / "base.py").write_text("BASE = 1.0\n")
    (inner / "__init__.py").write_text("")
    (inner / "helpers.py").write_text("HELP = 2.0\n")
    (inner / "verifier.py").write_text(
        "import helpers\n"
        "from rewards_of_mine.mathematics.helpers import HELP\n"
        "from . import helpers as beside\n"
        "from ..base import BASE\n"
        "def score(text, prompt): return helpers.HELP + HELP + beside.HELP + BASE\n"
    )
    assert load_verifier(f"{inner}/verifier.py:score")("", make_prompt()) == 7.0


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "judges_of_here").mkdir()
    (tmp_path / "judges_of_here" / "strict.py").write_text("def score(text, prompt): return 3.0\n")
    monkeypatch.chdir(tmp_path)
    assert load_verifier("judges_of_here.strict:score")("", make_prompt()) == 3.0


FOREIGN = """
import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("gsm8k", {"index": 7})
    return {"score": np.float32(solution_str == ground_truth), "acc": True}

def verl_of_two(solution_str, ground_truth, method="strict"):
    return method == "flexible" and solution_str == ground_truth

async def verl_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(solution_str == ground_truth)

def trl(prompts, completions, **kwargs):
    assert prompts == ["question"] and kwargs["level"] == ["hard"]
    return [float(completion == answer) for completion, answer in zip(completions, kwargs["answer"])]

def trl_column(completions, solution, level, **kwargs):
    return [float(c == s and l == "hard") for c, s, l in zip(completions, solution, level)]

async def trl_async(completions, answer):
    return [float(completions[0] == answer[0])]

def trl_two(completions, **kwargs):
    return [1.0, 2.0]

async def asynchronous(response, prompt):
    return float(response == prompt.answer)

async def custom_rm(args, sample, **kwargs):
    return 1.0

def three(response, answer, other):
    return 1.0

def silent_zero(response, answer):
    return float(response == answer)

def verl_more(solution_str, ground_truth, reward_router):
    return 1.0

def trl_more(completions, trainer_state):
    return [1.0]

class Judge:
    def __init__(self, response, prompt): pass
    def score(self, response, prompt): return float(response == prompt.answer)
judge = Judge(None, None)
bound = judge.score
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "foreign.py"
    path.write_text(FOREIGN)
    return str(path)


ROW = {"data_source": "gsm8k", "extra_info": {"index": 7}, "level": "hard"}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("compute_score", {}),
        ("verl_of_two", {"method": "flexible"}),
        ("verl_async", {}),
        ("trl", {}),
        ("trl_column", {}),
        ("trl_async", {}),
        ("asynchronous", {}),
        ("bound", {}),
    ],
)
def test_reward_functions_of_other_libraries(foreign, function, options):
    verifier = load_verifier(f"{foreign}:{function}", options)
    prompt = Prompt(0, np.array([1]), "question", answer="4", metadata=ROW)
    assert run_verifier(verifier, "4", prompt) == Reply("ok", 1.0)
    assert run_verifier(verifier, "5", prompt) == Reply("ok", 0.0)


def test_verls_ground_truth_of_a_row_without_an_answer_key(foreign):
    row = ROW | {"reward_model": {"style": "rule", "ground_truth": "4"}}
    prompt = Prompt(0, np.array([1]), "question", metadata=row)
    assert run_verifier(load_verifier(f"{foreign}:compute_score"), "4", prompt) == Reply("ok", 1.0)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "custom_rm",
            {},
            (
                "it is slime's custom_rm, whose arguments do not exist here; a verifier takes"
                " (response, p"
            ),
        ),
        (
            "three",
            {},
            (
                "it takes (response, answer, other) (missing a required argument: 'other'); a"
                " verifier takes"
            ),
        ),
        (
            "silent_zero",
            {},
            "its parameter 'answer' would be the Prompt: call it prompt and read prompt.answer",
        ),
        (
            "verl_more",
            {},
            "nothing gives its parameter 'reward_router'; set it in verifier_options",
        ),
        ("verl_of_two", {"methd": 1}, "it has no parameter 'methd', which verifier_options set"),
        ("trl_more", {}, "only TRL has its argument 'trainer_state'; give it a default"),
        (
            "Judge",
            {},
            (
                "it is a class and must be a function; a verifier takes (response, prompt),"
                " (responses, prompts), verl's (data_source"
            ),
        ),
        (
            "asynchronous",
            {"scale": 2},
            "it takes (response, prompt) (got an unexpected keyword argument 'scale'); a",
        ),
    ],
)
def test_another_signature_is_refused_when_it_is_loaded(foreign, function, options, message):
    with pytest.raises(VerifierError) as error:
        load_verifier(f"{foreign}:{function}", options)
    assert str(error.value).startswith(f"verifier '{foreign}:{function}': {message}")
    assert "\n" not in str(error.value)


def test_a_trl_function_returns_one_reward_for_one_completion(foreign):
    reply = run_verifier(load_verifier(f"{foreign}:trl_two"), "4", make_prompt())
    assert reply.status == "error"
    assert reply.message.endswith(
        "it returned [1.0, 2.0] for one completion; return a list of one number"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "exact",
            {},
            (
                "verifier 'exact' is unknown; use exact_match, math_verify, reasoning_gym, code,"
                " judge, judge_ranking, reward_model, file.py:function"
            ),
        ),
        ("exact_match", {"styl": "tag"}, "verifier exact_match: options {'styl': 'tag'} don't fit"),
        (
            "exact_match",
            {"style": "last"},
            "verifier style is 'last'; use one of whole, tag, boxed, hash",
        ),
        ("nowhere.py:f", {}, "verifier 'nowhere.py:f': no such file nowhere.py; check the path"),
        ("no_such_package:f", {}, "importing no_such_package failed (ModuleNotFoundError"),
        ("{folder}/good.py:missing", {}, "good.py has no 'missing'; define it or correct the name"),
        ("{folder}/good.py:number", {}, "'number' is a int; it must be a function"),
        ("{folder}/bad.py:f", {}, "failed (ZeroDivisionError: division by zero); fix it"),
    ],
)
def test_bad_names(name, options, message, tmp_path):
    (tmp_path / "good.py").write_text(USERS)
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(VerifierError) as error:
        load_verifier(name.format(folder=tmp_path), options)
    assert message in str(error.value) and "\n" not in str(error.value)
