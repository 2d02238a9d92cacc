"""Test cases of a prompt, in the layouts of the public data sets.

| field of the row | data set |
| --- | --- |
| `tests` | ours: [{"input": text, "output": text}], or with `fn_name` [{"args": [...], "output": value}] |
| `public_test_cases`, `private_test_cases`, `metadata` | LiveCodeBench |
| `input_output` | APPS, TACO |
| `public_tests`, `private_tests`, `generated_tests` | CodeContests |
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_BYTES = 512 * 2**20  # of private tests, decompressed


@dataclass(frozen=True)
class Case:
    """One test. stdin: what the program reads; for a function call the JSON list of arguments.

    accepted: the outputs that pass: text, or the JSON values of a call.
    """

    stdin: str
    accepted: tuple[Any, ...]


@dataclass(frozen=True)
class CodeTests:
    """The tests of a prompt. function: the name that they call, None if the program reads stdin."""

    function: str | None
    cases: tuple[Case, ...]


def read_tests(row: Mapping[str, Any]) -> CodeTests:
    """The tests of a row (`Prompt.metadata`). Raises ValueError if it has none or they can't be read."""
    for field, read in _FORMATS.items():
        if row.get(field):
            try:
                tests = read(row)
            except (LookupError, TypeError, AttributeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
                kind = type(error).__name__
                raise ValueError(f"the test cases in {field!r} can't be read ({kind}: {error})") from error
            if not tests.cases:
                raise ValueError(f"{field!r} has no test cases")
            return tests
    raise ValueError(f"the prompt has no test cases; it needs one of the fields {', '.join(_FORMATS)}")


def _plain(row: Mapping[str, Any]) -> CodeTests:
    name, tests = row.get("fn_name"), _json(row["tests"])
    if name is None:
        return CodeTests(None, tuple(Case(test["input"], (test["output"],)) for test in tests))
    return CodeTests(name, tuple(_call(test["args"], [test["output"]]) for test in tests))


def _livecodebench(row: Mapping[str, Any]) -> CodeTests:
    tests = [*_json(row.get("public_test_cases") or "[]"), *_private(row.get("private_test_cases") or "[]")]
    if tests and tests[0]["testtype"] == "functional":
        name = _json(row["metadata"])["func_name"]
        calls = [([json.loads(line) for line in test["input"].split("\n") if line.strip()], test) for test in tests]
        return CodeTests(name, tuple(_call(arguments, [json.loads(test["output"])]) for arguments, test in calls))
    return CodeTests(None, tuple(Case(test["input"], (test["output"],)) for test in tests))


def _private(text: str | list[Any]) -> list[Any]:
    """LiveCodeBench's private tests: JSON, or base64 of zlib of a pickled JSON text."""
    if not isinstance(text, str) or text.lstrip().startswith("["):
        return _json(text)
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(base64.b64decode(text), _MAX_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError(f"the private test cases have more than {_MAX_BYTES} bytes")
    found = _TextOnly(io.BytesIO(content)).load()
    if not isinstance(found, (str, bytes)):
        raise ValueError(f"the private test cases are a pickled {type(found).__name__}, not text")
    return json.loads(found)


class _TextOnly(pickle.Unpickler):
    """Loads no class and no function: a data file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def _apps(row: Mapping[str, Any]) -> CodeTests:
    both = _json(row["input_output"])
    name = both.get("fn_name")
    pairs = list(zip(both["inputs"], both["outputs"], strict=True))
    if name is None:
        return CodeTests(None, tuple(Case(_text(given), (_text(output),)) for given, output in pairs))
    # Some outputs are the value, others a list of one accepted value.
    wrapped = [[output, output[0]] if isinstance(output, list) and output else [output] for _, output in pairs]
    return CodeTests(name, tuple(_call(given, both) for (given, _), both in zip(pairs, wrapped, strict=True)))


def _code_contests(row: Mapping[str, Any]) -> CodeTests:
    cases: list[Case] = []
    for field in ("public_tests", "private_tests", "generated_tests"):
        tests = _json(row.get(field) or {"input": [], "output": []})
        pairs = zip(tests["input"], tests["output"], strict=True)
        cases += [Case(given, (output,)) for given, output in pairs]
    return CodeTests(None, tuple(cases))


def _call(arguments: Sequence[Any], accepted: Sequence[Any]) -> Case:
    return Case(json.dumps(list(arguments)), tuple(accepted))


def _text(value: Any) -> str:
    """APPS gives text, or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


_FORMATS = {
    "tests": _plain,
    "public_test_cases": _livecodebench,
    "private_test_cases": _livecodebench,
    "input_output": _apps,
    "public_tests": _code_contests,
    "private_tests": _code_contests,
    "generated_tests": _code_contests,
}
