import pytest

from megatron_gspo.rewards.verifiers import VerifierError, load_verifier
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


GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 1200+34 = 1,234.\n#### 1,234"


@pytest.mark.parametrize(
    ("style", "answer", "response", "reward"),
    [
        ("hash", GSM8K, "It is 1200 + 34.\n#### 1234", 1.0),
        ("hash", GSM8K, "#### $1,234.00", 1.0),
        ("hash", GSM8K, "#### 1235", 0.0),
        ("hash", GSM8K, "1234", 0.0),
        ("hash", "72", "#### 72.", 1.0),
        ("boxed", "so $x = \\boxed{\\frac{1}{2}}$.", "\\boxed{\\frac{1}{2}}", 1.0),
        ("boxed", "5", "I get \\boxed{4}. No: \\boxed{5.0}", 1.0),
        ("tag", "<answer>4</answer>", "<answer> 4.0 </answer>", 1.0),
        ("whole", "72.0", "72", 1.0),
        ("whole", "72", " 72.0\n", 1.0),
        ("whole", "true", "True", 1.0),
        ("whole", "#### 72", "72", 0.0),
    ],
)
def test_exact_match_of_numbers_and_of_whole_solutions_as_answers(style, answer, response, reward):
    assert load_verifier("exact_match", {"style": style})(response, make_prompt(answer=answer)) == reward


def test_math_verify():
    pytest.importorskip("math_verify")
    verifier = load_verifier("math_verify")
    half = make_prompt(answer="\\frac{1}{2}")
    assert verifier("The answer is $0.5$.", half) == 1.0
    assert verifier("so \\boxed{\\frac{2}{4}}", half) == 1.0
    assert verifier("so \\boxed{\\frac{2}{3}}", half) == 0.0
    assert verifier("no idea", half) == 0.0
    assert verifier("x is 12", make_prompt(answer="12")) == 1.0
    with pytest.raises(ValueError, match="can't read the reference answer"):
        verifier("1", make_prompt(answer=""))


def test_a_users_function_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_verifiers.py").write_text(USERS)
    from_file = load_verifier(f"{tmp_path}/my_verifiers.py:length")
    assert from_file("abc", make_prompt()) == 6.0
    assert load_verifier(f"{tmp_path}/my_verifiers.py:length", {"scale": 0.5})("abc", make_prompt()) == 3.0
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_verifier("my_verifiers:length")("ab", make_prompt()) == 4.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "exact",
            {},
            "verifier 'exact' is unknown; use exact_match, math_verify, reasoning_gym, code, file.py:function",
        ),
        ("exact_match", {"styl": "tag"}, "verifier exact_match: options {'styl': 'tag'} don't fit"),
        ("exact_match", {"style": "last"}, "verifier style is 'last'; use one of whole, tag, boxed, hash"),
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
