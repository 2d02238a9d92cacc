"""From a response to its reward, in real sandboxes."""

import os
import shutil
import signal
from dataclasses import asdict

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.case_formats import read_tests
from megatron_gspo.rewards.sandbox.code_verifier import run_tests, score
from megatron_gspo.rewards.scorer import RewardScorer
from tests.rewards.sandbox.fusion_server import fusion_server
from tests.rewards.sandbox.mechanisms import any_sandbox
from tests.support.samples import make_prompt

THREE = {
    "tests": [{"input": f"{a} {b}\n", "output": str(a + b)} for a, b in ((2, 3), (4, 5), (10, -1))]
}
SUM = "print(sum(map(int, input().split())))"
CPP = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"


@pytest.fixture(scope="module")
def sandbox():
    sandbox = any_sandbox(time_limit=2.0)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    ("program", "rule", "verdicts", "reward"),
    [
        (SUM, "all", ["passed"] * 3, 1.0),
        (SUM, "fraction", ["passed"] * 3, 1.0),
        ("print(5)", "all", ["passed", "wrong_answer"], 0.0),
        ("print(5)", "fraction", ["passed", "wrong_answer", "wrong_answer"], 1 / 3),
        ("print(9)", "all", ["wrong_answer"], 0.0),
        ("```text\nno program\n```", "fraction", ["no_program"], 0.0),
    ],
)
def test_scores(sandbox, program, rule, verdicts, reward):
    tests = read_tests(THREE)
    config = CodeConfig(score=rule, time_limit=2.0)
    assert run_tests(sandbox, program, tests, config) == verdicts
    assert score(verdicts, 3, rule) == reward


def test_a_response_out_of_time_is_over_its_limit(sandbox):
    config = CodeConfig(score="fraction", time_limit=2.0)
    program = "import time\ntime.sleep(0.5)\n" + SUM
    assert run_tests(sandbox, program, read_tests(THREE), config, time_budget=0.3) == [
        "passed",
        "time_limit",
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_cpp():
    config = CodeConfig(language="cpp", time_limit=2.0)
    sandbox = any_sandbox(language="cpp", time_limit=2.0)
    try:
        assert run_tests(sandbox, CPP, read_tests(THREE), config) == ["passed"] * 3
        for program in (
            "int main() {",
            '#include "/etc/passwd"\nint main() {}',
            '#include "main.cpp"\n',
            "",
        ):
            assert run_tests(sandbox, program, read_tests(THREE), config) == ["compile_error"]
        crash = "#include <cstdlib>\nint main() { std::abort(); }"
        assert run_tests(sandbox, crash, read_tests(THREE), config) == ["runtime_error"]
        with pytest.raises(ValueError, match="data.code.language: python"):
            run_tests(
                sandbox,
                CPP,
                read_tests({"fn_name": "f", "tests": [{"args": [1], "output": 1}]}),
                config,
            )
    finally:
        sandbox.close()


def scorer(**options):
    return RewardScorer(
        "code", asdict(CodeConfig(require_isolation=False, **options)), timeout=60.0, workers=1
    )


def scores(scorer, *responses, **metadata):
    prompt = make_prompt(**metadata)
    return scorer.score_texts([(response, prompt) for response in responses])


def test_a_sandbox_that_dies_is_a_failure_and_replaced(sandbox):
    """Killed while a program runs: no verdict. The next program has a new one."""
    program = sandbox.prepare("import time\ntime.sleep(1)")
    os.kill(sandbox._launcher.process_ids[0], signal.SIGSTOP)
    os.kill(sandbox._launcher.process_ids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the launcher of the sandbox failed"):
        program("")
    assert run_tests(sandbox, SUM, read_tests(THREE), CodeConfig()) == ["passed"] * 3


def test_failures_are_counted_and_have_no_reward():
    with fusion_server() as server, scorer(sandbox_url=server.url) as scorer_:
        server.faults = [404]
        scored = scores(scorer_, SUM, SUM, "print(5)", **THREE)
        assert scored.statuses == ("error", "ok", "ok")
        assert str(scored.rewards.tolist()) == "[nan, 1.0, 0.0]"
        assert scored.counts == {"error": 1, "timeout": 0, "invalid": 0}
        assert "HTTP 404" in scored.messages[0]
        assert scored.verdicts["passed"] == scored.verdicts["wrong_answer"] == 1
        assert sum(scored.verdicts.values()) == 2
        assert "no test cases" in scores(scorer_, SUM).messages[0]


def test_the_verifier_says_what_isolates_programs(sandbox):
    python = sandbox._python  # one that the sandbox's user can run
    with scorer(python=python) as scorer_:
        assert scorer_.description == f"verifier code: {sandbox.isolation.describe()}"
        assert scorer_.description.endswith(
            "isolates file system, network, processes, system calls"
        )
    with (
        fusion_server() as server,
        RewardScorer("code", {"sandbox_url": server.url}, timeout=None) as scorer_,
    ):
        assert (
            scorer_.description
            == f"verifier code: {server.url}/run_code runs and isolates the programs"
        )
