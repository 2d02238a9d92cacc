"""Answers in a response, and whether one equals a reference answer."""

import pytest

from megatron_gspo.rewards.answer_extraction import equal_answers, extract_answer


@pytest.mark.parametrize(
    ("style", "text", "answer"),
    [
        ("whole", " 4\n", "4"),
        ("tag", "<answer>1</answer> no, <answer> 2 </answer>.", "2"),
        ("tag", "<answer>1</answer> <answer>2", "1"),
        ("tag", "2", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}", "1"),
        ("boxed", "boxed{1}", None),
        ("boxed", r"I get \boxed{5}. \boxed{6}", "6"),
        ("boxed", r"\boxed{6} \boxed{}", "6"),
        ("boxed", r"\boxed{1} or $\fbox{2}$", "2"),
        ("boxed", r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("boxed", r"\boxed{a \\{b}}", r"a \\{b}"),
        ("boxed", r"\boxed{\boxed{7}}", "7"),
        ("boxed", "$\\boxed{\n\\text{Yes}\n}$", r"\text{Yes}"),
        ("boxed", r"so $\boxed 5$.", "5"),
        ("boxed", r"so \boxed 42.", "42"),
        ("boxed", r"$\boxed\frac{1}{2}$, done", r"\frac{1}{2}"),
        ("boxed", r"put it in \boxed", None),
        ("boxed", r"\boxedanswer{3}", None),
        ("hash", "1 + 1\n#### 2 \nmore", "2"),
        ("hash", "####\n72", "72"),
        ("hash", "2", None),
    ],
)
def test_extract_answer(style, text, answer):
    assert extract_answer(text, style) == answer


def test_unknown_style():
    with pytest.raises(
        ValueError, match="style 'last' is unknown; use one of whole, tag, boxed, hash"
    ):
        extract_answer("", "last")


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("4", "4", True),
        ("72", "72.0", True),
        ("72.0", "72", True),
        ("72.5", "72", False),
        ("1,234", "1234", True),
        ("1234", "1,234.00", True),
        ("1,23", "123", False),
        ("-3", "-3.0", True),
        ("+3", "3", True),
        ("\u22123", "-3", True),
        ("1e+20", "100000000000000000000", True),
        (".5", "0.5", True),
        ("0.1", "0.10000000000000001", False),
        ("007", "7", False),  # a code, not a number
        ("00", "0", False),
        ("1/2", "0.5", False),
        ("True", "true", True),
        ("FALSE", "false", True),
        ("true", "false", False),
        ("null", "null", True),
        ("Paris", "paris", False),
        ("nan", "nan", True),
        ("72", "", False),
    ],
)
def test_numbers_are_equal_as_numbers_and_texts_as_texts(answer, reference, equal):
    assert equal_answers(answer, reference) is equal


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("72", "72", True),
        ("$1,234", "1234", True),
        ("1234", "$1,234", True),
        ("72.", "72", True),
        ("72 dollars", "72.0", True),
        ("**", "72", False),
        ("72**", "72", True),
        ("-5 degrees", "-5", True),
        ("72/100", "72", False),
        ("720", "72", False),
        ("about 72", "72", False),
        ("72 pears", "72 apples", False),
    ],
)
def test_a_number_after_hash_is_read_from_the_start(answer, reference, equal):
    assert equal_answers(answer, reference, "hash") is equal
