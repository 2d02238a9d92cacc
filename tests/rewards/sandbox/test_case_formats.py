"""Rows as the public data sets have them."""

import base64
import json
import os
import pickle
import zlib
from dataclasses import replace

import pytest

from megatron_gspo.config import DataConfig
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.data.prompts import load_prompts
from megatron_gspo.rewards.sandbox import case_formats
from megatron_gspo.rewards.sandbox.case_formats import Case, CodeTests, read_tests
from megatron_gspo.rewards.sandbox.code_verifier import run_tests
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.rewards.sandbox.mechanisms import any_sandbox
from tests.tools.evaluate.public_files import write_jsonl, write_parquet


@pytest.fixture(scope="module")
def sandbox():
    sandbox = any_sandbox(time_limit=2.0)
    yield sandbox
    sandbox.close()


def packed(content):
    """LiveCodeBench's private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


STDIN = [
    {"input": "1\n", "output": "2\n", "testtype": "stdin"},
    {"input": "3\n", "output": "4\n", "testtype": "stdin"},
]
FUNCTION = [{"input": '[1, 2]\n"x"', "output": "[true]", "testtype": "functional"}]
TWO = CodeTests(None, (Case("1\n", ("2\n",)), Case("3\n", ("4\n",))))
TWO_IN_HARNESS = replace(TWO, harness=True)


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"tests": [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "4\n"}]}, TWO),
        (
            {"tests": [{"args": [1, "a"], "output": [2]}], "fn_name": "f"},
            CodeTests("f", (Case('[1, "a"]', ([2],)),)),
        ),
        (
            {"public_test_cases": json.dumps(STDIN), "private_test_cases": "[]", "metadata": "{}"},
            TWO_IN_HARNESS,
        ),
        (
            {
                "public_test_cases": json.dumps(STDIN[:1]),
                "private_test_cases": packed(json.dumps(STDIN[1:])),
            },
            TWO_IN_HARNESS,
        ),
        (
            {"public_test_cases": json.dumps(FUNCTION), "metadata": '{"func_name": "f"}'},
            CodeTests("f", (Case('[[1, 2], "x"]', ([True],)),), harness=True),
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
            {
                "public_tests": {"input": ["1\n"], "output": ["2\n"]},
                "private_tests": {"input": [], "output": []},
                "generated_tests": {"input": ["3\n"], "output": ["4\n"]},
            },
            TWO,
        ),
    ],
    ids=[
        "ours",
        "our calls",
        "LiveCodeBench",
        "packed",
        "LiveCodeBench calls",
        "APPS",
        "lines",
        "APPS calls",
        "CodeContests",
    ],
)
def test_formats(row, tests):
    assert read_tests(row) == tests


SUM_OF_LINES = "class Solution:\n    def total(self, xs, k):\n        return sum(xs) * k"
TEXT = {"input": "[1, 2]\n3\n", "output": "9"}


@pytest.mark.parametrize(
    "row",
    [
        {"tests": [{**TEXT, "testtype": "functional", "metadata": {"func_name": "total"}}]},
        {"tests": [{**TEXT, "testtype": "functional"}], "metadata": {"func_name": "total"}},
        {"tests": [{"input": "[1,\n 2]\n\n3", "output": " 9\n"}], "fn_name": "total"},
        {"tests": json.dumps([{"input": [[1, 2], 3], "output": 9}]), "fn_name": "total"},
        {"tests": [{"args": "[[1, 2], 3]", "output": "9"}], "fn_name": "total"},
        {
            "tests": [
                {"input": [[1, 2], 3], "output": [9], "type": "function_call", "fn_name": "total"}
            ]
        },
        {"tests": json.dumps({"fn_name": "total", "inputs": ["[1, 2]\n3"], "outputs": ["9"]})},
        {"tests": {"inputs": [[[1, 2], 3]], "outputs": [[9]]}, "fn_name": "total"},
        {"input_output": {"fn_name": "total", "inputs": ["[1, 2]\n3"], "outputs": ["9"]}},
        {
            "input_output": json.dumps({"inputs": [[[1, 2], 3]], "outputs": [9]}),
            "metadata": '{"func_name": "total"}',
        },
        {
            "public_test_cases": [{"input": "[1, 2]\n3", "output": "9", "testtype": "functional"}],
            "fn_name": "total",
        },
    ],
    ids=str,
)
def test_calls_in_the_layouts_of_data_sets(sandbox, row):
    tests = read_tests(row)
    assert tests.function == "total"
    assert tests.cases[0].stdin == "[[1, 2], 3]"
    assert 9 in tests.cases[0].accepted
    assert run_tests(sandbox, SUM_OF_LINES, tests, CodeConfig()) == ["passed"]
    wrong = SUM_OF_LINES.replace(" * k", "")
    assert run_tests(sandbox, wrong, tests, CodeConfig()) == ["wrong_answer"]


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ('"abc"', "abc"),
        ("null", None),
        ("true", True),
        ("1.5", 1.5),
        ("[]", []),
        ('{"a": 1}', {"a": 1}),
        ("None", None),
        ("'abc'", "abc"),
        ("(1, 2)", [1, 2]),
        ('"a\\nb"', "a\nb"),
    ],
)
def test_arguments_and_results_in_text(value, argument):
    row = {"fn_name": "f", "tests": [{"input": f"{value}\n7", "output": value}]}
    (case,) = read_tests(row).cases
    assert json.loads(case.stdin) == [argument, 7]
    assert json.loads(json.dumps(case.accepted[0])) == argument


@pytest.mark.parametrize(
    ("given", "printed", "stdin", "accepted"),
    [
        (5, 9, "5", ("9",)),
        (1.5, -2, "1.5", ("-2",)),
        (None, "9", "", ("9",)),
        ("1", True, "1", ("True", "true")),
        (["1 2", "3"], ["4", 5], "1 2\n3", ("4\n5",)),
        ([[1, 2], [3]], [[4, 5]], "1 2\n3", ("4 5",)),
        ("", "", "", ("",)),
        (False, False, "False", ("False", "false")),
    ],
)
@pytest.mark.parametrize(
    "layout", ["tests", "columns", "input_output", "public_tests", "public_test_cases"]
)
def test_what_programs_read_and_print_need_not_be_text(layout, given, printed, stdin, accepted):
    test = {"input": given, "output": printed}
    columns = {"inputs": [given], "outputs": [printed]}
    rows = {
        "tests": {"tests": [test]},
        "columns": {"tests": columns},
        "input_output": {"input_output": columns},
        "public_tests": {"public_tests": {"input": [given], "output": [printed]}},
        "public_test_cases": {"public_test_cases": json.dumps([{**test, "testtype": "stdin"}])},
    }
    assert read_tests(rows[layout]).cases == (Case(stdin, accepted),)


@pytest.mark.parametrize(
    ("outputs", "accepted"),
    [
        ([[7, 8, 9]], [([7, 8, 9],)]),
        ([[7]], [([7], 7)]),
        ([[[1, 2]], [[3]]], [([[1, 2]], [1, 2]), ([[3]], [3])]),
        ([[7], [8, 9]], [([7],), ([8, 9],)]),
        ([[7], []], [([7],), ([],)]),
        ([["ab"], "cd"], [(["ab"], "ab"), ("cd",)]),
        ([None, [True]], [(None,), ([True], True)]),
    ],
)
def test_a_list_of_one_value_may_be_the_value(outputs, accepted):
    both = {"fn_name": "f", "inputs": [[n] for n in range(len(outputs))], "outputs": outputs}
    assert [
        case.accepted for case in read_tests({"input_output": json.dumps(both)}).cases
    ] == accepted


PUBLIC = {  # rows of the public files: the key of the prompt, and the fields that they have
    "APPS": (
        "question",
        {
            "problem_id": 0,
            "question": "Add one to n.",
            "solutions": "[]",
            "difficulty": "interview",
            "url": "",
            "input_output": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}),
            "starter_code": "",
        },
    ),
    "CodeContests": (
        "description",
        {
            "name": "1_A. Next",
            "description": "Add one to n.",
            "source": 2,
            "difficulty": 7,
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["3\n"], "output": ["4\n"]},
            "solutions": {"language": [3], "solution": ["print(int(input()) + 1)"]},
            "cf_rating": 800,
            "time_limit": {"seconds": 1, "nanos": 0},
            "memory_limit_bytes": 256000000,
            "cf_tags": ["math"],
        },
    ),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("data_set", PUBLIC)
def test_rows_of_public_files_are_loaded_and_scored(sandbox, tmp_path, data_set, suffix):
    key, row = PUBLIC[data_set]
    path = (write_jsonl if suffix == "jsonl" else write_parquet)(tmp_path / f"rows.{suffix}", [row])
    data = DataConfig(prompts=str(path), prompt_key=key, answer_key=None, verifier="code")
    (prompt,) = load_prompts(path, character_tokenizer(), data).prompts
    assert prompt.text == "Add one to n." and read_tests(prompt.metadata) == TWO
    config = CodeConfig(time_limit=2.0)
    for program, verdicts in (
        ("print(int(input()) + 1)", ["passed"] * 2),
        ("print(2)", ["passed", "wrong_answer"]),
    ):
        assert run_tests(sandbox, program, read_tests(prompt.metadata), config) == verdicts


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
        ({"tests": [{"input": "1", "output": None}]}, "no expected output: it is null"),
        (
            {"tests": [{"input": {"a": 1}, "output": "1"}]},
            "a dictionary where a program reads or prints text",
        ),
        (
            {"tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
            "a function that has no name",
        ),
        (
            {"tests": [{"args": 5, "output": "1"}], "fn_name": "f"},
            "the arguments of a call are 5; give a list",
        ),
        (
            {"tests": [{"input": "1", "output": "one two"}], "fn_name": "f"},
            "neither JSON nor Python's literals",
        ),
        (
            {"tests": [{"input": "1", "output": "1 2"}], "fn_name": "f"},
            "'1 2' is not the JSON of one value",
        ),
        ({"tests": ["1"]}, "can't be read"),
        ({"tests": 5}, "can't be read"),
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
