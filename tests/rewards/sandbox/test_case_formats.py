"""Rows as the public data sets have them."""

import base64
import json
import os
import pickle
import zlib

import pytest

from megatron_gspo.rewards.sandbox import case_formats
from megatron_gspo.rewards.sandbox.case_formats import Case, CodeTests, read_tests


def packed(content):
    """LiveCodeBench's private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3\n", "output": "4\n", "testtype": "stdin"}]
FUNCTION = [{"input": '[1, 2]\n"x"', "output": "[true]", "testtype": "functional"}]
TWO = CodeTests(None, (Case("1\n", ("2\n",)), Case("3\n", ("4\n",))))


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"tests": [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "4\n"}]}, TWO),
        (
            {"tests": [{"args": [1, "a"], "output": [2]}], "fn_name": "f"},
            CodeTests("f", (Case('[1, "a"]', ([2],)),)),
        ),
        ({"public_test_cases": json.dumps(STDIN), "private_test_cases": "[]", "metadata": "{}"}, TWO),
        (
            {"public_test_cases": json.dumps(STDIN[:1]), "private_test_cases": packed(json.dumps(STDIN[1:]))},
            TWO,
        ),
        (
            {"public_test_cases": json.dumps(FUNCTION), "metadata": '{"func_name": "f"}'},
            CodeTests("f", (Case('[[1, 2], "x"]', ([True],)),)),
        ),
        ({"input_output": '{"inputs": ["1\\n", "3\\n"], "outputs": ["2\\n", "4\\n"]}'}, TWO),
        (
            {"input_output": {"inputs": [["1", "2"]], "outputs": [["3", "4"]]}},
            CodeTests(None, (Case("1\n2", ("3\n4",)),)),
        ),
        (
            {"input_output": '{"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], 4]}'},
            CodeTests("f", (Case("[1]", ([3], 3)), Case("[2]", (4,)))),
        ),
        (
            {"public_tests": {"input": ["1\n"], "output": ["2\n"]}, "private_tests": {"input": [], "output": []},
             "generated_tests": {"input": ["3\n"], "output": ["4\n"]}},
            TWO,
        ),
    ],
    ids=["ours", "our calls", "LiveCodeBench", "packed", "LiveCodeBench calls", "APPS", "lines", "APPS calls",
         "CodeContests"],
)  # fmt: skip
def test_formats(row, tests):
    assert read_tests(row) == tests


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "needs one of the fields tests, public_test_cases"),
        ({"tests": []}, "needs one of the fields"),
        ({"tests": "[]"}, "has no test cases"),
        ({"tests": [{"input": "1"}]}, "can't be read .KeyError: 'output'"),
        ({"tests": "no JSON"}, "Expecting value"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "shorter"),
        ({"public_test_cases": "[]", "private_test_cases": "!"}, "can't be read"),
        ({"private_test_cases": packed(["a", "list"])}, "a pickled list, not text"),
    ],
)
def test_what_is_wrong_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        read_tests(row)


class Command:
    def __reduce__(self):
        return os.system, ("touch escaped",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="posix.system is refused"):
        read_tests({"private_test_cases": packed(Command())})
    assert list(tmp_path.iterdir()) == []


def test_a_zip_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(case_formats, "_MAX_BYTES", 2**20)
    assert len(read_tests({"private_test_cases": packed(json.dumps(STDIN + STDIN))}).cases) == 4
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        read_tests({"private_test_cases": packed("[" + " " * 2**21 + "]")})
