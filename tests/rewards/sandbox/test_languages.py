"""The program in a response."""

import subprocess
import sys

import pytest

from megatron_gspo.rewards.sandbox.languages import calling, extract_code, with_harness


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
        # sample output, in plain fences and in others
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```\n1 2\n```\n```python\nprint(1)\n```\n```\n3\n```\n~~~\n4\n~~~", "print(1)\n"),
        ("```\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```\nn = 5\n```\n```\nimport sys\n```\n```\nnums = [1, 2], k = 2\n```", "import sys\n"),
        ("```\nx = 1\n```\n```\n5\n```", "5\n"),
        (
            (
                "```\nUse a"
                " loop.\n```\n```py\nprint(1)\n```\n```output\n1\n```\n```text\nprint(9)\n```"
            ),
            "print(1)\n",
        ),
        (
            "```python\nprint(1)\n```\nCorrected:\n```python\nprint(2)\n```\n```\n2\n```",
            "print(2)\n",
        ),
        ("```python\nprint(1)\n```\n```python\n\n```", "print(1)\n"),
        # labels
        ("```Python 3\nprint(1)\n```", "print(1)\n"),
        ("```python3.11\nprint(1)\n```", "print(1)\n"),
        ("```{.python .numberLines}\nprint(1)\n```", "print(1)\n"),
        ("``` python title='x'\nprint(1)\n```", "print(1)\n"),
        ("```python:main.py\nprint(1)\n```", "print(1)\n"),
        ("```solution.py\nprint(1)\n```", "print(1)\n"),
        ("```pypy3\nprint(1)\n```\n```pycon\n>>> 1\n```\n```python-repl\n>>> 1\n```", "print(1)\n"),
        # fences
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("~~~~python\nprint('''\n~~~\n```\n''')\n~~~~", "print('''\n~~~\n```\n''')\n"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("```python\nprint(1)\n```   \n```\n1\n```", "print(1)\n"),
        ("```python\nprint(0)\n\n```python\nprint(1)\n```", "print(1)\n"),
        ("```\nThe idea\n```python\nprint(1)\n```", "print(1)\n"),
        ("Use `x` and ```y```.\n```python\nprint(1)\n```", "print(1)\n"),
        ("~~~python\nprint(1)", None),
        # indentation
        (
            "1. So:\n\n   ```python\n   for i in (1, 2):\n       f(i)\n   ```",
            "for i in (1, 2):\n    f(i)\n",
        ),
        ("- ```python\n  if 1:\n\n      print(1)\n  ```", "if 1:\n\n    print(1)\n"),
        (
            "```python\n    print(1)\n    if 1:\n        print(2)\n```",
            "print(1)\nif 1:\n    print(2)\n",
        ),
        ("  ```python\n  s = '''\na'''\n  print(s)\n  ```", "s = '''\na'''\nprint(s)\n"),
        ("\t```python\n\tif 1:\n\t\tprint(1)\n\t```", "if 1:\n\tprint(1)\n"),
        # thoughts
        ("<think>\n```python\nprint(0)\n```\n</think>\n```\nprint(1)\n```", "print(1)\n"),
        ("<think>\n```python\nprint(0)\n```\n</think>\nThe program above.", "print(0)\n"),
    ],
)
def test_the_last_complete_block_counts(response, code):
    assert extract_code(response, "python") == code


def test_blocks_of_another_language_do_not():
    response = "```python\nprint(1)\n```\n```cpp\nint main() {}\n```"
    assert extract_code(response, "python") == "print(1)\n"
    assert extract_code(response, "cpp") == "int main() {}\n"
    for label in ("C++", "c++17", "cc", "cpp20", "main.cpp", ""):
        response = f"```{label}\n#include <cstdio>\nint main() {{}}\n```\n```\n5\n```"
        assert extract_code(response, "cpp") == "#include <cstdio>\nint main() {}\n"
    assert extract_code(response, "python") == "5\n"


def run(program, stdin=""):
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], input=stdin, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "program",
    [
        (
            "print(sorted(Counter('aab').items()), gcd(4, 6), mean([1, 2]), ascii_lowercase[0],"
            " datetime.date(2020, 1, 1))"
        ),
        (
            "def f(x: List[int]) -> Optional[int]:\n    return reduce(add, x)\nprint(f([1, 2]),"
            " StringIO('x').read())"
        ),
        (
            "print(loads('[1]'), deepcopy([1]), pow(2, 3, 5), search('a', 'ba').start(),"
            " stdin.read() == '', choice([1]))"
        ),
        (
            "class A(defaultdict): pass\nprint(A(int)[0], isinstance(Counter(), dict),"
            " type(OrderedDict()).__module__)"
        ),
        "print(eval('comb(4, 2)'), sys.getrecursionlimit())",
        "def f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
        (
            "from __future__ import annotations\nfrom math import *\nimport re\nprint(floor(1.5),"
            " re.I, heappop([1]))"
        ),
    ],
)
def test_programs_have_the_names_of_the_harness(program):
    outcome = run(with_harness(program))
    assert outcome.returncode == 0 and outcome.stdout, outcome.stderr


def test_a_program_s_own_names_stay():
    program = "def add(*x): return 'mine'\nprint(add(1, 2))\nprint(mean([1, 3]))"
    assert run(with_harness(program)).stdout == "mine\n2\n"
    assert (
        run(with_harness("if __name__ == '__main__':\n    print(__name__)")).stdout == "__main__\n"
    )
    assert "NameError" in run(with_harness("print(no_such_name)")).stderr
    assert "SyntaxError" in run(with_harness("The sum is five.")).stderr


@pytest.mark.parametrize(
    ("program", "imported"),
    [
        ("import math\ndef f(x):\n    return math.floor(x)\nprint(f(1.5), len('a'))", False),
        ("class A:\n    def f(self, xs: List[int]): pass", True),
        ("def f():\n    global count\n    count = 1\nf()", False),
        ("exec('1')", True),
    ],
)
def test_names_are_imported_where_they_are_used(program, imported):
    program += "\nimport sys\nprint('statistics' in sys.modules)"
    assert run(with_harness(program)).stdout.endswith(f"{imported}\n")


def test_a_call_prints_the_result_alone():
    program = calling('def f(a, b):\n    print("noise {}")\n    return {"a": (a, b)}', "f")
    assert run(program, '[1, "x"]').stdout == '{"a": [1, "x"]}'
