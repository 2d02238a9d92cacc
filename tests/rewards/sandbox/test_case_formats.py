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


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3\n", "output": "4\n", "testtype": "stdin"}]
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
        ({"public_test_cases": json.dumps(STDIN), "private_test_cases": "[]", "metadata": "{}"}, TWO_IN_HARNESS),
        (
            {"public_test_cases": json.dumps(STDIN[:1]), "private_test_cases": packed(json.dumps(STDIN[1:]))},
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


PUBLIC = {  # rows of the public files: the key of the prompt, and the fields that they have
    "APPS": ("question", {
        "problem_id": 0, "question": "Add one to n.", "solutions": "[]", "difficulty": "interview", "url": "",
        "input_output": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}), "starter_code": "",
    }),
    "TACO": ("question", {
        "question": "Add one to n.", "solutions": "[]", "starter_code": "", "difficulty": "EASY", "raw_tags": "[]",
        "input_output": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}), "name": None,
        "source": "codechef", "tags": "[]", "skill_types": "[]", "url": None, "Expected Auxiliary Space": None,
        "time_limit": "1 seconds", "date": "2019-07-01", "picture_num": None, "memory_limit": None,
        "Expected Time Complexity": None,
    }),
    "CodeContests": ("description", {
        "name": "1_A. Next", "description": "Add one to n.", "source": 2, "difficulty": 7,
        "public_tests": {"input": ["1\n"], "output": ["2\n"]}, "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["3\n"], "output": ["4\n"]},
        "solutions": {"language": [3], "solution": ["print(int(input()) + 1)"]}, "cf_rating": 800,
        "time_limit": {"seconds": 1, "nanos": 0}, "memory_limit_bytes": 256000000, "cf_tags": ["math"],
    }),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("data_set", PUBLIC)
def test_rows_of_public_files_are_loaded_and_scored(sandbox, tmp_path, data_set, suffix):
    key, row = PUBLIC[data_set]
    path = (write_jsonl if suffix == "jsonl" else write_parquet)(tmp_path / f"rows.{suffix}", [row])
    data = DataConfig(prompts=str(path), prompt_key=key, answer_key=None, verifier="code")
    (prompt,) = load_prompts(path, character_tokenizer(), data).prompts
    assert prompt.text == "Add one to n." and read_tests(prompt.metadata) == TWO
    config = CodeConfig(time_limit=2.0)
    for program, verdicts in (("print(int(input()) + 1)", ["passed"] * 2), ("print(2)", ["passed", "wrong_answer"])):
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
