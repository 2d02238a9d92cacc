"""The program in a response."""

import subprocess
import sys

import pytest

from megatron_gspo.rewards.sandbox.languages import calling, extract_code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nor\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\n```python\nprint(2", "print(1)\n"),
        ("```python\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
        ("```text\n1\n```", None),
        ("```python\nprint(1)", None),
        ("  ```Python3\nx = 1\n\nprint(x)\n  ```", "x = 1\n\nprint(x)\n"),
        ("", ""),
    ],
)
def test_the_last_complete_block_counts(response, code):
    assert extract_code(response, "python") == code


def test_blocks_of_another_language_do_not():
    response = "```python\nprint(1)\n```\n```cpp\nint main() {}\n```"
    assert extract_code(response, "python") == "print(1)\n"
    assert extract_code(response, "cpp") == "int main() {}\n"


def test_a_call_prints_the_result_alone():
    program = calling('def f(a, b):\n    print("noise {}")\n    return {"a": (a, b)}', "f")
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", program], input='[1, "x"]', capture_output=True, text=True)
    assert ran.stdout == '{"a": [1, "x"]}'
