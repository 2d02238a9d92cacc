"""The client against a server of the same protocol over loopback: verdicts, retries, and the
circuit breaker.
"""

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.case_formats import read_tests
from megatron_gspo.rewards.sandbox.code_verifier import run_tests
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.fusion_client import BREAKER_FAILURES, RETRIES, FusionSandbox
from tests.rewards.sandbox.fusion_server import FAILED, fusion_server

TESTS = read_tests({"tests": [{"input": "2 3\n", "output": "5"}]})
SUM = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def server():
    with fusion_server() as server:
        yield server


def verdicts(server, program, tests=TESTS, sandbox=None, **options):
    config = CodeConfig(sandbox_url=server.url, **options)
    return run_tests(sandbox or FusionSandbox(config, backoff=0.001), program, tests, config)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (SUM, "passed"),
        ("print(6)", "wrong_answer"),
        ("print(5)\nraise SystemExit(1)", "runtime_error"),
        ("import time\ntime.sleep(60)", "time_limit"),
        ("print('x' * 2 ** 21)", "output_limit"),
        ("print('x' * 2 ** 23)", "output_limit"),
    ],
)
def test_verdicts(server, program, verdict):
    assert verdicts(server, program, time_limit=0.1, output_mib=1) == [verdict]


def test_a_compile_error_ends_the_tests(server):
    tests = read_tests({"tests": [{"input": "", "output": "1"}, {"input": "", "output": "1"}]})
    assert verdicts(server, "x", tests, language="cpp", score="fraction") == ["compile_error"]


def test_the_request_has_the_limits_and_no_expected_output(server):
    tests = read_tests({"tests": [{"input": "2 3\n", "output": "expected text"}]})
    verdicts(server, SUM, tests, time_limit=2.0, memory_mib=512)
    request = server.requests[-1]
    assert request.pop("compile_timeout") == 60.0
    assert request == {
        "code": SUM,
        "language": "python",
        "stdin": "2 3\n",
        "run_timeout": 7.0,
        "memory_limit_MB": 512,
    }


ERROR = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Error"},
}


FINISHED = {"status": "Finished", "return_code": 0, "stdout": "5", "stderr": ""}
BROKEN = [
    None,
    5,
    "text",
    [],
    {},
    True,
    b"",
    b"[" * 10**5,
    {"status": None},
    {"status": "Success"},
    {"status": "Success", "run_result": 5},
    {"status": "Success", "run_result": []},
    {"status": "Success", "run_result": {**FINISHED, "status": "unknown"}},
    {"status": "Success", "run_result": {**FINISHED, "return_code": None}},
    {"status": "Success", "run_result": {**FINISHED, "return_code": "0"}},
    {"status": "Success", "run_result": {**FINISHED, "stdout": 5}},
    {"status": "Success", "run_result": {**FINISHED, "cpu_time": "fast"}},
    {"status": "Success", "compile_result": FINISHED, "run_result": None},
    {"status": "Failed", "compile_result": "no", "run_result": None},
    {"status": "Failed", "compile_result": {"status": "Error"}, "run_result": None},
]


@pytest.mark.parametrize("answer", BROKEN, ids=lambda answer: str(answer)[:60])
def test_a_broken_answer_is_a_failure_of_the_server(server, answer):
    server.faults = [answer] * (RETRIES + 1)
    with pytest.raises(SandboxError, match=server.url):
        verdicts(server, SUM)
    assert not server.faults


def test_a_redirect_is_not_followed(server):
    with fusion_server() as other:
        server.faults = [other.url + "/run_code"]
        with pytest.raises(
            SandboxError, match="HTTP 302, a redirect; give the address that it leads to"
        ):
            verdicts(server, "print(5)")
        assert other.requests == []


@pytest.mark.parametrize(
    "fault", [500, 503, 429, FAILED, ERROR, {}, [], b"not JSON", "close"], ids=str
)
def test_a_passing_fault_is_retried(server, fault):
    server.faults, before = [fault] * RETRIES, len(server.requests)
    assert verdicts(server, SUM) == ["passed"]
    assert len(server.requests) - before == RETRIES + 1


@pytest.mark.parametrize(
    ("fault", "requests", "reason"),
    [
        (503, RETRIES + 1, "HTTP 503"),
        (FAILED, RETRIES + 1, "no space left"),
        (404, 1, "HTTP 404"),
    ],
)
def test_a_lasting_fault_has_no_verdict(server, fault, requests, reason):
    server.faults, before = [fault] * requests, len(server.requests)
    with pytest.raises(SandboxError, match=reason):
        verdicts(server, SUM)
    assert len(server.requests) - before == requests and not server.faults


def test_a_server_that_fails_is_left_alone(server):
    sandbox = FusionSandbox(CodeConfig(sandbox_url=server.url), backoff=0.001)
    server.faults = [404] * BREAKER_FAILURES
    for _ in range(BREAKER_FAILURES):
        with pytest.raises(SandboxError, match="HTTP 404"):
            verdicts(server, SUM, sandbox=sandbox)
    before = len(server.requests)
    with pytest.raises(SandboxError, match="not asked"):
        verdicts(server, SUM, sandbox=sandbox)
    assert len(server.requests) == before
