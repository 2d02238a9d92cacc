"""Answers in a response."""
import pytest

from megatron_gspo.rewards.answer_extraction import extract_answer


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
        ("hash", "1 + 1\n#### 2 \nmore", "2"),
        ("hash", "2", None),
    ],
)
def test_extract_answer(style, text, answer):
    assert extract_answer(text, style) == answer


def test_unknown_style():
    with pytest.raises(ValueError, match="style 'last' is unknown; use one of whole, tag, boxed, hash"):
        extract_answer("", "last")
