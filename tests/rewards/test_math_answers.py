r"""`math_verify` against Math-Verify itself, called as in its README:
`verify(parse("$reference$"), parse(text))`.
"""

import logging

import pytest

from megatron_gspo.rewards.verifiers import load_verifier
from tests.support.samples import make_prompt

math_verify = pytest.importorskip("math_verify")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

SAME_VERDICT = [
    # reference, response, reward
    ("36", r"\boxed{\$36}", 1),
    (r"\$36", r"\boxed{36}", 1),
    (r"\$36", r"It costs \boxed{\$36.00}.", 1),
    (r"\$36", r"\boxed{35}", 0),
    ("$36", r"\boxed{36}", 1),
    (r"\$1{,}000", r"\boxed{1000}", 1),
    (r"36\%", r"\boxed{36}", 1),
    (r"36\%", r"\boxed{36\%}", 1),
    (r"36\%", r"\boxed{0.36}", 1),
    (r"36\%", r"\boxed{37\%}", 0),
    ("36%", r"\boxed{36\%}", 1),
    ("36 percent", r"\boxed{36\%}", 1),
    ("1{,}000", r"\boxed{1000}", 1),
    ("1,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1,000}", 1),
    ("1000", r"\boxed{1\!,\!000}", 1),
    ("10,000,000", r"\boxed{10000000}", 1),
    ("1,000.50", r"\boxed{1000.5}", 1),
    ("1.000", r"\boxed{1000}", 0),
    ("72", r"\boxed{72.0}", 1),
    ("72.0", "The answer is 72", 1),
    ("-3", "\\boxed{\u22123}", 1),
    (r"90^\circ", r"\boxed{90}", 1),
    ("90", r"\boxed{90^{\circ}}", 1),
    ("90", r"\boxed{90 \text{ degrees}}", 1),
    (r"5 \text{ cm}", r"\boxed{5}", 1),
    ("5", r"\boxed{5 cm}", 1),
    (r"5\text{ cm}^2", r"\boxed{5 \text{ cm}^2}", 1),
    ("5", r"\boxed{5\mbox{ inches}}", 1),
    ("5", r"\boxed{5\,\mathrm{m/s}}", 1),
    (r"100\text{ square units}", r"\boxed{100}", 1),
    (r"\frac12", r"\boxed{0.5}", 1),
    (r"\dfrac{1}{2}", r"\boxed{\tfrac{1}{2}}", 1),
    (r"\frac{1}{2}", r"\boxed{1/2}", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{3}}", 0),
    (r"1\frac{1}{2}", r"\boxed{1.5}", 1),
    (r"\frac{3}{2}", r"\boxed{1\frac12}", 1),
    ("[0,1)", r"\boxed{[0, 1)}", 1),
    ("[0,1)", r"\boxed{[0, 1]}", 0),
    (r"[0,1) \cup (2,3]", r"\boxed{[0,1)\cup(2,3]}", 1),
    (r"x\in[0,1]", r"\boxed{[0,1]}", 1),
    ("(1,2)", r"\boxed{(2,1)}", 0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    (r"\{1,2\}", r"\boxed{1,2}", 1),
    ("1, 2", r"$x=\boxed{1}$ or $x=\boxed{2}$", 1),
    ("2", r"\boxed{3 \text{ or } 2}", 0),
    (r"\pm 3", r"\boxed{3, -3}", 1),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        "\\boxed{\\begin{bmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{bmatrix}}",
        1,
    ),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", 0),
    ("x = 5", r"\boxed{5}", 1),
    ("5", r"\boxed{x = 5}", 1),
    ("x=5", r"\boxed{y=5}", 0),
    ("2x+1", r"\boxed{y=2x+1}", 1),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}", 1),
    (r"\pi", r"\boxed{3.14159}", 0),
    (r"1.5 \times 10^3", r"\boxed{1500}", 1),
    (r"\binom{5}{2}", r"\boxed{10}", 1),
    ("(A)", r"\boxed{A}", 1),
    ("A", r"\boxed{\textbf{(A)}}", 1),
    (r"\text{(A)}", r"\boxed{\text{(B)}}", 0),
    ("yes", r"\boxed{Yes}", 1),
    ("Yes", r"\boxed{\text{Yes}}", 1),
    (r"\text{Yes}", r"\boxed{No}", 0),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", 1),
    ("6", r"the answer is $\boxed 6$.", 1),
    ("6", r"$\boxed{\boxed{6}}$", 1),
    ("6", r"\boxed{6", 0),
    ("6", r"\boxed{}", 0),
    ("7", r"x is 7 \boxed{}", 1),
    ("3/4", "The answer is 3/4.", 1),
    ("12", "so we get 12 apples.", 1),
    (r"$\frac{1}{2}$", r"\boxed{.5}", 1),
    ("$x=5$", r"\boxed{5}", 1),
    (r"\(5\)", r"\boxed{5}", 1),
    (r"We get $x=3$, so \boxed{\frac{3}{4}}.", r"\boxed{0.75}", 1),
    ("48/2 = <<48/2=24>>24 clips.\n#### 1,234", r"\boxed{1234}", 1),
]

OTHER_VERDICT = [
    # reference, response, our reward, why ours is right
    (
        "6",
        r"\boxed{5}. \boxed{6}",
        1,
        "boxes with less than 10 characters between them are joined to {5, 6}",
    ),
    (
        "6",
        "I get \\boxed{5}.\n\nWait, that is wrong.\n\nFinal: \\boxed{6}",
        1,
        "and those with a comma between them",
    ),
    ("6", r"\fbox{6}", 1, "a box without \\boxed is not looked for"),
    (r"1\,000", r"\boxed{1000}", 1, "a thin space between digits is a product: 1 * 000 = 0"),
    (r"1\,000", r"\boxed{0}", 0, "the same product"),
    ("1 000", r"\boxed{1000}", 1, "the same product"),
    ("1 1/2", r"\boxed{\frac{3}{2}}", 1, "a mixed number as text is read up to its space"),
    ("1 1/2", r"\boxed{1}", 0, "the same"),
    (r"0.\overline{3}", r"\boxed{0}", 0, "a repeating decimal is read up to its point"),
    ("90", "\\boxed{90\u00b0}", 1, "the degree sign is not read"),
    ("5 dollars", r"\boxed{5}", 1, "the word is a product of letters"),
    ("5", "\\boxed{\u20ac5}", 1, "the sign is not read"),
    (r"\[5\]", r"\boxed{5}", 1, "display mathematics inside of dollar signs is not read"),
    ("true", r"\boxed{\text{True}}", 1, "texts are compared with their case, except in \\text"),
    ("I", r"\boxed{\text{I}}", 1, "the choice is the imaginary unit"),
    (r"\text{A,B}", r"\boxed{A,B}", 1, "a text never equals a set"),
    ("east", r"\boxed{seat}", 0, "words are products of their letters"),
    ("A", "The answer is (A).", 1, "choices are not looked for outside of a box"),
    ("A", "I think the answer is **A** because of b.", 1, "the same"),
    ("yes", "The answer is yes.", 1, "words are not looked for outside of a box"),
    ("no", "No.", 1, "the same"),
]


def ours(reference: str, response: str) -> float:
    return load_verifier("math_verify")(response, make_prompt(answer=reference))


def theirs(reference: str, response: str) -> float:
    gold = math_verify.parse(f"${reference}$", parsing_timeout=None)
    answer = math_verify.parse(response, parsing_timeout=None)
    return float(math_verify.verify(gold, answer, timeout_seconds=None))


@pytest.mark.parametrize(("reference", "response", "reward"), SAME_VERDICT)
def test_the_verdict_is_math_verifys(reference, response, reward):
    assert ours(reference, response) == theirs(reference, response) == reward


@pytest.mark.parametrize(("reference", "response", "reward", "reason"), OTHER_VERDICT)
def test_the_verdict_is_better_than_math_verifys(reference, response, reward, reason):
    assert ours(reference, response) == reward
    assert theirs(reference, response) == 1 - reward, f"Math-Verify has changed: {reason}"


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("A", "The answer is (B).", 0),
        ("A", "A good question. The answer is a tree.", 0),
        ("A", "The answer is B, not A", 0),
        ("no", "Yes.", 0),
        ("yes", "The answer is not yes.", 0),
        (r"0.\overline{3}", r"\boxed{0.\overline{3}}", 1),
    ],
)
def test_words_outside_of_a_box(reference, response, reward):
    assert ours(reference, response) == reward
