"""A client of a Sandbox Fusion server: `POST /run_code`, with retries and a circuit breaker."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from typing import Any

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.config.server_urls import check_url
from megatron_gspo.errors import first_line
from megatron_gspo.rewards.sandbox.circuit_breaker import CircuitBreaker
from megatron_gspo.rewards.sandbox.command import Ending, Outcome, SandboxError
from megatron_gspo.rewards.sandbox.sandboxes import COMPILATION, Program

RETRIES = 4
BACKOFF_SECONDS = 0.5  # before the first retry; doubled before each further one
BREAKER_FAILURES, BREAKER_SECONDS = 3, 30.0
_GRACE_SECONDS = 10.0
_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


class FusionSandbox:
    """Programs on a Sandbox Fusion server, which compiles them too."""

    def __init__(self, config: CodeConfig, *, backoff: float = BACKOFF_SECONDS) -> None:
        """backoff: seconds before the first retry. Raises ConfigError for an invalid `sandbox_url`."""
        assert config.sandbox_url is not None
        self._url = check_url(config.sandbox_url) + "/run_code"
        self._config, self._backoff = config, backoff
        self._breaker = CircuitBreaker(BREAKER_FAILURES, BREAKER_SECONDS)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

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
            raise SandboxError(f"{self._url} has failed {BREAKER_FAILURES} times in a row; it is not asked for now")
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
                time.sleep(self._backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                return self._outcome(self._post(body))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code not in _RETRIED_STATUS:
                    break
            except (OSError, http.client.HTTPException, ValueError, SandboxError) as error:
                reason = first_line(error)
        raise SandboxError(f"{self._url}: {reason}")

    def _post(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        seconds = COMPILATION.wall_seconds + self._config.wall_limit + _GRACE_SECONDS
        limit = 4 * self._config.output_mib * 2**20
        with self._opener.open(urllib.request.Request(self._url, body, headers), timeout=seconds) as answer:
            content = answer.read(limit + 1)
        if len(content) > limit:
            return None
        return json.loads(content)

    def _outcome(self, answer: Any) -> Outcome:
        """The outcome in an answer. Raises SandboxError if the server failed, ValueError if it breaks its protocol."""
        if answer is None:
            return Outcome("output", 0, b"")
        try:
            if answer["status"] == "SandboxError":
                raise SandboxError(f"SandboxError: {answer.get('message')}")
            compiled, ran = answer.get("compile_result"), answer.get("run_result")
            if ran is None:
                if compiled is None:
                    raise ValueError("the answer has neither compile_result nor run_result")
                return Outcome("compile_error", 1, b"", (compiled.get("stderr") or "").encode())
            if ran["status"] == "Error":
                raise SandboxError("run_result.status is Error")
            code, late = ran.get("return_code"), ran["status"] == "TimeLimitExceeded"
            cpu_seconds = ran.get("cpu_time") or 0.0
            stdout, stderr = ((ran.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the answer breaks the protocol ({type(error).__name__}: {error})") from error
        ending: Ending = "wall_time" if late else "exit"
        if cpu_seconds > self._config.time_limit:
            ending = "cpu_time"
        if len(stdout) > self._config.output_mib * 2**20:
            ending = "output"
        return Outcome(ending, 137 if code is None else code, stdout, stderr, cpu_seconds)
