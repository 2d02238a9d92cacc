"""Test cases of a prompt, in the layouts of the public data sets.

| field of the row | data set |
| --- | --- |
| `tests` | ours: [{"input": text, "output": text}], or with `fn_name` [{"args": [...], "output": value}] |
| `tests` | DeepCoder: LiveCodeBench's tests, PrimeIntellect's with `type`, or APPS' dictionary |
| `official_tests` | Codeforces, as ours |
| `public_test_cases`, `private_test_cases`, `metadata` | LiveCodeBench |
| `input_output` | APPS, TACO |
| `public_tests`, `private_tests`, `generated_tests` | CodeContests |
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""The fields of a prompt, or of a test."""

_MAX_BYTES = 512 * 2**20  # of private tests, decompressed


@dataclass(frozen=True)
class Case:
    """One test."""

    stdin: str
    """What the program reads; for a function call the JSON list of arguments."""

    accepted: tuple[object, ...]
    """The outputs that pass: text, or the JSON values of a call."""


@dataclass(frozen=True)
class CodeTests:
    """The tests of a prompt."""

    function: str | None
    """The name that they call, None if the program reads stdin."""

    cases: tuple[Case, ...]
    harness: bool = False
    """Whether programs have the names and the recursion limit of LiveCodeBench's harness, as its
    data set assumes; programs whose function is called always have."""


def read_tests(row: Row) -> CodeTests:
    """The tests of a row (`Prompt.metadata`).

    Raises ValueError if it has none or they can't be read.
    """
    for field, read in _FORMATS.items():
        if row.get(field):
            try:
                tests = read(row, field)
            except (
                LookupError,
                TypeError,
                AttributeError,
                EOFError,
                zlib.error,
                pickle.UnpicklingError,
            ) as error:
                raise ValueError(
                    f"the test cases in {field!r} can't be read ({type(error).__name__}: {error})"
                ) from error
            if not tests.cases:
                raise ValueError(f"{field!r} has no test cases")
            return tests
    raise ValueError(
        f"the prompt has no test cases; it needs one of the fields {', '.join(_FORMATS)}"
    )


def _plain(row: Row, field: str) -> CodeTests:
    """A list of tests, or a dictionary of lists as in `input_output`."""
    tests = _json(row[field])
    if isinstance(tests, dict):
        return _columns(tests, row)
    return _listed(tests, row, harness=any("testtype" in test for test in tests))


def _livecodebench(row: Row, field: str) -> CodeTests:
    tests = [
        *_json(row.get("public_test_cases") or "[]"),
        *_private(row.get("private_test_cases") or "[]"),
    ]
    return _listed(tests, row, harness=True)


def _listed(tests: Sequence[Row], row: Row, *, harness: bool) -> CodeTests:
    names = [name for name in map(_function_name, [*tests, row]) if name is not None]
    name = names[0] if names else None
    if not any(_calls(test, name) for test in tests):
        printing = tuple(_printing(test["input"], test["output"]) for test in tests)
        return CodeTests(None, printing, harness)
    if name is None:
        raise ValueError(
            "the test cases call a function that has no name; give it as 'fn_name' of the row"
        )
    outputs = [_result(test["output"], test.get("args", test.get("input"))) for test in tests]
    are_calls = any(test.get("type") == "function_call" for test in tests)
    wrapped = are_calls and _may_be_wrapped(outputs)
    cases = []
    for test, output in zip(tests, outputs, strict=True):
        if "args" in test:
            arguments = _arguments(test["args"], one_list=True)
        else:
            arguments = _arguments(test["input"])
        cases.append(_call(arguments, output, wrapped))
    return CodeTests(name, tuple(cases), harness)


def _function_name(fields: Row) -> str | None:
    """LiveCodeBench: `func_name` in `metadata`; other data sets: `fn_name`."""
    metadata = fields.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
        metadata = json.loads(metadata)
    for source in (fields, metadata):
        if isinstance(source, Mapping):
            name = source.get("fn_name") or source.get("func_name")
            if name:
                return str(name)
    return None


def _calls(test: Row, name: str | None) -> bool:
    """Whether a test calls a function: as it says, or as the row's name of one says."""
    said = (test.get("testtype"), test.get("type"))
    if "functional" in said or "function_call" in said:
        return True
    return name is not None and "stdin" not in said and "stdin_stdout" not in said


def _private(text: str | list[Any]) -> list[Any]:
    """LiveCodeBench's private tests: JSON, or base64 of zlib of a pickled JSON text."""
    if not isinstance(text, str) or text.lstrip().startswith("["):
        return _json(text)
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(base64.b64decode(text), _MAX_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError(f"the private test cases have more than {_MAX_BYTES} bytes")
    unpickled = _TextOnly(io.BytesIO(content)).load()
    if not isinstance(unpickled, (str, bytes)):
        raise ValueError(
            f"the private test cases are a pickled {type(unpickled).__name__}, not text"
        )
    return json.loads(unpickled)


class _TextOnly(pickle.Unpickler):
    """Loads no class and no function: a data file cannot run code."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def _apps(row: Row, field: str) -> CodeTests:
    return _columns(_json(row[field]), row)


def _columns(tests: Row, row: Row) -> CodeTests:
    """APPS, TACO: a list of inputs and one of outputs."""
    name = _function_name(tests) or _function_name(row)
    inputs = tests["inputs"] if "inputs" in tests else tests["input"]
    outputs = tests["outputs"] if "outputs" in tests else tests["output"]
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return CodeTests(None, tuple(_printing(stdin, stdout) for stdin, stdout in pairs))
    results = [_result(output, arguments) for arguments, output in pairs]
    wrapped = _may_be_wrapped(results)
    cases = []
    for arguments, result in zip(inputs, results, strict=True):
        cases.append(_call(_arguments(arguments), result, wrapped))
    return CodeTests(name, tuple(cases))


def _code_contests(row: Row, field: str) -> CodeTests:
    cases: list[Case] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        tests = _json(row.get(name) or {"input": [], "output": []})
        cases += [
            _printing(stdin, stdout)
            for stdin, stdout in zip(tests["input"], tests["output"], strict=True)
        ]
    return CodeTests(None, tuple(cases))


def _printing(stdin: object, stdout: object) -> Case:
    """A test of a program that reads and prints."""
    if stdout is None:
        raise ValueError("a test case has no expected output: it is null")
    accepted = [_text(stdout)]
    if isinstance(stdout, bool):  # true as well as True
        accepted.append(_text(stdout).lower())
    return Case(_text(stdin), tuple(accepted))


def _text(value: object) -> str:
    """A text, a list of lines, or a number, as data sets give what programs read and print.

    null is no text.
    """
    if isinstance(value, list):
        lines = [
            " ".join(map(_text, line)) if isinstance(line, list) else _text(line) for line in value
        ]
        return "\n".join(lines)
    if isinstance(value, dict):
        raise ValueError(
            f"a test case has a dictionary where a program reads or prints text: {value}"
        )
    return "" if value is None else str(value)


def _call(arguments: list[object], output: object, wrapped: bool) -> Case:
    """wrapped: whether an output that is a list may also be a list of the value."""
    accepted = [output]
    if wrapped and isinstance(output, list):
        accepted.append(output[0])
    return Case(json.dumps(arguments), tuple(accepted))


def _may_be_wrapped(outputs: Sequence[object]) -> bool:
    """Whether outputs may be lists of one value: some rows of APPS and TACO have the values, others
    lists of them.

    A list of another length is a value, and so are the others of its row.
    """
    return all(len(output) == 1 for output in outputs if isinstance(output, list))


def _arguments(value: object, *, one_list: bool = False) -> list[object]:
    """Arguments of a call: a list of them, or the text of one JSON value after another, each on its
    line.

    one_list: whether a text is the JSON of the list.
    """
    if isinstance(value, str):
        values = _values(value)
        value = values[0] if one_list and len(values) == 1 else values
    if not isinstance(value, list):
        raise ValueError(f"the arguments of a call are {value!r}; give a list")
    return value


def _result(value: object, arguments: object) -> object:
    """What a call returns: a value, or its JSON text where the arguments are text too."""
    if not isinstance(value, str) or not isinstance(arguments, str):
        return value
    values = _values(value)
    if len(values) != 1:
        raise ValueError(f"the expected value {value!r} is not the JSON of one value")
    return values[0]


def _values(text: str) -> list[object]:
    """The JSON values of a text, or else the Python literals of its lines."""
    decoder = json.JSONDecoder()
    remaining = text.lstrip()
    values: list[object] = []
    try:
        while remaining:
            value, end = decoder.raw_decode(remaining)
            values.append(value)
            remaining = remaining[end:].lstrip()
    except ValueError:
        try:
            return [ast.literal_eval(line) for line in text.split("\n") if line.strip()]
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{text!r} is neither JSON nor Python's literals") from error
    return values


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


_FORMATS = {
    "tests": _plain,
    "public_test_cases": _livecodebench,
    "private_test_cases": _livecodebench,
    "input_output": _apps,
    "official_tests": _plain,
    "public_tests": _code_contests,
    "private_tests": _code_contests,
    "generated_tests": _code_contests,
}
