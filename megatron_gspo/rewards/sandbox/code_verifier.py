"""The verifier `code`: runs the program of a response on the prompt's test cases."""

from __future__ import annotations

import time
from typing import Any, Literal

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.named_reward import NamedReward
from megatron_gspo.rewards.sandbox.case_formats import Case, CodeTests, read_tests
from megatron_gspo.rewards.sandbox.command import Outcome, SandboxError
from megatron_gspo.rewards.sandbox.fusion_client import FusionSandbox
from megatron_gspo.rewards.sandbox.languages import calling, extract_code, with_harness
from megatron_gspo.rewards.sandbox.output_comparison import same_text, same_value
from megatron_gspo.rewards.sandbox.sandboxes import (
    CompileError,
    Program,
    Sandbox,
    open_local_sandbox,
)

Verdict = Literal[
    "passed",
    "wrong_answer",
    "runtime_error",
    "time_limit",
    "output_limit",
    "compile_error",
    "no_program",
]
_LIMITS: dict[str, Verdict] = {
    "cpu_time": "time_limit",
    "wall_time": "time_limit",
    "output": "output_limit",
    "compile_error": "compile_error",
}


def open_sandbox(config: CodeConfig) -> Sandbox:
    """The sandbox that the config selects.

    Raises SandboxError or ConfigError in one line if it can't be used.
    """
    if config.sandbox_url is not None:
        return FusionSandbox(config)
    return open_local_sandbox(config)


class CodeVerifier:
    """The verifier: the reward of a response, named after its first test that is not passed.

    description: one line, where programs run and how they are isolated.
    """

    def __init__(self, *, time_budget: float | None = None, **options: Any) -> None:
        """Check that programs can run here.

        Args:
            options: fields of `CodeConfig`.
            time_budget: see `run_tests`.

        Raises:
            SandboxError: programs can't run here; in one line.
            TypeError: an unknown option.
        """
        self._config = CodeConfig(**options)
        self._time_budget = time_budget
        self._sandbox = open_sandbox(self._config)
        self.description = f"verifier code: {self._sandbox.describe()}"

    def __call__(self, text: str, prompt: Prompt) -> NamedReward:
        tests = read_tests(prompt.metadata)
        verdicts = run_tests(
            self._sandbox, text, tests, self._config, time_budget=self._time_budget
        )
        failures = [verdict for verdict in verdicts if verdict != "passed"]
        reason = failures[0] if failures else "passed"
        return NamedReward(score(verdicts, len(tests.cases), self._config.score), reason)


def score(verdicts: list[Verdict], count: int, rule: Literal["all", "fraction"]) -> float:
    """The reward of a response. verdicts: of the tests that were run, of `count`."""
    passed = verdicts.count("passed")
    if rule == "all":
        return float(passed == count)
    return passed / count


def run_tests(
    sandbox: Sandbox,
    text: str,
    tests: CodeTests,
    config: CodeConfig,
    *,
    time_budget: float | None = None,
) -> list[Verdict]:
    """Verdicts of the tests in their order; up to the first that is not passed if all must pass.

    time_budget: seconds for all tests of the response; those left then are over their time limit.
    Raises SandboxError if the sandbox failed, so that there is no verdict; ValueError for tests
    that can't be run.
    """
    deadline = None if time_budget is None else time.monotonic() + time_budget
    source = extract_code(text, config.language)
    if source is None:
        return ["no_program"]
    if tests.function is not None:
        if config.language != "python":
            raise ValueError(
                f"tests that call a function need data.code.language: python, not {config.language}"
            )
        source = calling(source, tests.function)
    elif tests.harness and config.language == "python":
        source = with_harness(source)
    try:
        program = sandbox.prepare(source)
    except CompileError:
        return ["compile_error"]
    verdicts: list[Verdict] = []
    for case in tests.cases:
        if deadline is not None and time.monotonic() > deadline:
            verdicts.append("time_limit")
            break
        verdict = _judge(program, case, tests.function, config)
        verdicts.append(verdict)
        if verdict == "compile_error" or (config.score == "all" and verdict != "passed"):
            break
    return verdicts


def _judge(program: Program, case: Case, function: str | None, config: CodeConfig) -> Verdict:
    outcome = program(case.stdin)
    if outcome.ending != "exit":
        return _LIMITS[outcome.ending]
    if outcome.code != 0:
        return "runtime_error"
    if _is_right(outcome, case, function, config.float_tolerance):
        return "passed"
    return "wrong_answer"


def _is_right(outcome: Outcome, case: Case, function: str | None, tolerance: float) -> bool:
    if function is not None:
        return same_value(outcome.stdout, case.accepted, tolerance)
    return any(same_text(outcome.stdout, str(expected), tolerance) for expected in case.accepted)


__all__ = ["CodeVerifier", "SandboxError", "open_sandbox", "run_tests", "score"]
