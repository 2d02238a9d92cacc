"""A client of a Sandbox Fusion server: `POST /run_code`, with retries and a circuit breaker."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.config.server_urls import check_url
from megatron_gspo.errors import first_line
from megatron_gspo.rewards.sandbox.circuit_breaker import CircuitBreaker
from megatron_gspo.rewards.sandbox.command import Ending, Outcome, SandboxError
from megatron_gspo.rewards.sandbox.sandboxes import COMPILATION, Program
from megatron_gspo.servers.backoff import Backoff

RETRIES = 4
BACKOFF_SECONDS = 0.5  # before the first retry; doubled before each further one
BREAKER_FAILURES = 3
BREAKER_SECONDS = 30.0
_GRACE_SECONDS = 10.0
_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


class FusionSandbox:
    """Programs on a Sandbox Fusion server, which compiles them too."""

    def __init__(self, config: CodeConfig, *, backoff: float = BACKOFF_SECONDS) -> None:
        """backoff: seconds before the first retry.

        Raises ConfigError for an invalid `sandbox_url`.
        """
        assert config.sandbox_url is not None
        self._url = check_url(config.sandbox_url) + "/run_code"
        self._config = config
        self._backoff = Backoff(backoff)
        self._answer_bytes = 4 * config.output_mib * 2**20
        self._breaker = CircuitBreaker(BREAKER_FAILURES, BREAKER_SECONDS)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def prepare(self, source: str) -> Program:
        """See `Sandbox`. A compile error is an outcome of each run."""
        return lambda stdin: self._run(source, stdin)

    def describe(self) -> str:
        """See `Sandbox`."""
        return f"{self._url} runs and isolates the programs"

    def close(self) -> None:
        """See `Sandbox`."""

    def _run(self, source: str, stdin: str) -> Outcome:
        request = {
            "code": source,
            "language": self._config.language,
            "stdin": stdin,
            "compile_timeout": COMPILATION.wall_seconds,
            "run_timeout": self._config.wall_limit,
            "memory_limit_MB": self._config.memory_mib,
        }
        if not self._breaker.allows():
            raise SandboxError(
                f"{self._url} has failed {BREAKER_FAILURES} times in a row; it is not asked for now"
            )
        try:
            outcome = self._ask(json.dumps(request).encode())
        except SandboxError:
            self._breaker.record(False)
            raise
        self._breaker.record(True)
        return outcome

    def _ask(self, body: bytes) -> Outcome:
        for attempt in range(RETRIES + 1):
            if attempt:
                time.sleep(self._backoff.seconds(attempt))
            try:
                return self._outcome(self._post(body))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if 300 <= error.code < 400:
                    reason += (
                        ", a redirect; give the address that it leads to as data.code.sandbox_url"
                    )
                if error.code not in _RETRIED_STATUS:
                    break
            except (OSError, http.client.HTTPException, ValueError, SandboxError) as error:
                reason = first_line(error)
        raise SandboxError(f"{self._url}: {reason}")

    def _post(self, body: bytes) -> bytes:
        """The answer, of which more than `_answer_bytes` are cut off."""
        headers = {"Content-Type": "application/json"}
        seconds = COMPILATION.wall_seconds + self._config.wall_limit + _GRACE_SECONDS
        with self._opener.open(
            urllib.request.Request(self._url, body, headers), timeout=seconds
        ) as answer:
            content: bytes = answer.read(self._answer_bytes + 1)
        return content

    def _outcome(self, content: bytes) -> Outcome:
        """The outcome in an answer.

        Raises SandboxError if the server failed, ValueError if it breaks its protocol.
        """
        if len(content) > self._answer_bytes:
            return Outcome("output", 0, b"")
        try:
            answer = json.loads(content)
        except RecursionError as error:
            raise ValueError("the answer is nested too deeply") from error
        answer = _object(answer, "the answer")
        status = _text(answer, "status", ("Success", "Failed", "SandboxError"))
        if status == "SandboxError":
            raise SandboxError(f"SandboxError: {answer.get('message')}")
        if answer.get("run_result") is None:
            compiled = _object(answer.get("compile_result"), "compile_result")
            _check_finished(compiled, "compile_result")
            if compiled.get("return_code") == 0:
                raise ValueError("the program was compiled, and there is no run_result")
            return Outcome(
                "compile_error", 1, b"", _text(compiled, "stderr").encode(errors="replace")
            )
        ran = _object(answer["run_result"], "run_result")
        late = _check_finished(ran, "run_result") == "TimeLimitExceeded"
        cpu_seconds = ran.get("cpu_time") or 0.0
        code = 137 if late and ran.get("return_code") is None else ran.get("return_code")
        if not isinstance(cpu_seconds, (int, float)) or not isinstance(code, int):
            raise ValueError("run_result has no return_code, or its cpu_time is not a number")
        stdout = _text(ran, "stdout").encode(errors="replace")
        stderr = _text(ran, "stderr").encode(errors="replace")
        ending: Ending = "wall_time" if late else "exit"
        if cpu_seconds > self._config.time_limit:
            ending = "cpu_time"
        if len(stdout) > self._config.output_mib * 2**20:
            ending = "output"
        return Outcome(ending, code, stdout, stderr, cpu_seconds)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Programs go to the server that the config names alone."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """Refuse: the redirect is an HTTPError."""


def _object(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__}, not an object")
    return value


def _text(fields: dict[str, object], name: str, known: tuple[str, ...] = ()) -> str:
    """A field; "" for null. Raises ValueError if it is no text, or none of the known ones."""
    value = fields.get(name)
    value = "" if value is None else value
    if not isinstance(value, str) or (known and value not in known):
        raise ValueError(
            f"{name} is {str(value)[:40]!r}"
            + (f", none of {', '.join(known)}" if known else ", no text")
        )
    return value


def _check_finished(fields: dict[str, object], name: str) -> str:
    """The status of a run. Raises SandboxError if the server failed."""
    status = _text(fields, "status", ("Finished", "TimeLimitExceeded", "Error"))
    if status == "Error":
        raise SandboxError(f"{name}.status is Error")
    return status
