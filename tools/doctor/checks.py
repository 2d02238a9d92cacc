"""The checks in their order: config, ranks and groups, what a host's first rank looks at."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch

from megatron_gspo.config import Config, ConfigError, ParallelConfig, load_config
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.config.model_checks import read_hf_config
from megatron_gspo.errors import InputError
from megatron_gspo.models import ModelShape
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor import input_checks, issue_checks
from megatron_gspo.tools.doctor.findings import (
    Finding,
    error,
    examine,
    exit_code,
    failed,
    merge,
    note,
    ok,
    worst,
)
from megatron_gspo.tools.doctor.options import Options
from megatron_gspo.tools.doctor.report import write_text
from megatron_gspo.tools.doctor.version_checks import (
    installed,
    judge_accelerator,
    judge_versions,
    numbers,
)


@dataclass
class Checks:
    """One rank's checks, and what they have found so far.

    config: None without one, or if it is invalid.
    """

    options: Options
    rank: int = 0
    local_rank: int = 0
    processes: int = 1
    versions: Mapping[str, str | None] = field(default_factory=installed)
    findings: list[Finding] = field(default_factory=list)
    config: Config | None = None

    @property
    def world_size(self) -> int:
        """Processes that the config is checked for."""
        return self.options.world_size or self.processes

    def add(self, check: str, action: Callable[[], Iterable[Finding]]) -> None:
        self.findings += examine(check, action)

    def load(self) -> list[Finding]:
        overrides, for_servers = split_server_arguments(self.options.overrides)
        self.config = load_config(self.options.config, overrides, server_args=for_servers)
        return []

    def check_ranks(self) -> bool:
        """Whether the ranks can go on together."""
        from megatron_gspo.tools.doctor import ranks

        parallel = self.config.parallel if self.config is not None else ParallelConfig()
        seconds = self.options.seconds
        self.findings += ranks.meet(parallel, seconds)
        if worst(self.findings) == "error" and self.findings[-1].check == "ranks.missing":
            return False
        text = self.config.to_yaml() if self.config is not None else ""
        digest = hashlib.sha256(text.encode()).hexdigest()
        compared = ranks.compare_ranks(self.versions, digest)
        self.findings += compared
        if worst(compared) == "error":
            self.findings.append(note("groups.all", "skipped because of the ranks' errors"))
            return True
        timed = replace(parallel, distributed_timeout_minutes=seconds / 60)
        self.add("groups.all", lambda: ranks.check_groups(timed))
        return True

    def check_host(self) -> None:
        """What the ranks of a host share; what exists once is checked by rank 0."""
        gpu = torch.cuda.is_available()
        self.add("versions.packages", lambda: judge_versions(self.versions, gpu=gpu))
        self.add("versions.cuda", _accelerator)
        hf: dict[str, Any] = {}
        servers: dict[str, Any] = {}
        config = self.config
        if config is not None:
            self.add("config.check", lambda: self._check_config(config))
            hf = self._check_inputs(config)
            if self.rank == 0 and config.rollout.engine in SERVER_KINDS:
                self.add("servers.answer", lambda: _check_servers(config, servers))
        self.add(
            "known_issues.all",
            lambda: issue_checks.check_issues(
                issue_checks.situation(
                    self.versions, config, hf, world_size=self.world_size, **servers
                )
            ),
        )

    def _check_config(self, config: Config) -> list[Finding]:
        try:
            config.check(self.world_size)
        except ConfigError as failure:
            finding = failed("config.check", failure, "a run would stop at its start")
            if "processes" in failure.problem and self.world_size == 1:
                hint = ", or start the doctor with torchrun as the run, or pass --world-size N"
                return [replace(finding, fix=finding.fix + hint)]
            return [finding]
        count = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        return [ok("config.check", f"{self.options.config}: valid on {count}")]

    def _check_inputs(self, config: Config) -> dict[str, Any]:
        """The model, the prompts and the run's directory; returns the model's config.json, {}
        if it can't be read.
        """
        shapes: list[ModelShape] = []

        def weights() -> list[Finding]:
            shape, found = input_checks.check_weights(config)
            shapes.append(shape)
            return found

        try:
            hf = read_hf_config(config.model.path)
        except ConfigError:
            hf = {}  # reported with the config
        if hf:
            self.add("model.weights", weights)
        if shapes:
            [shape] = shapes
            self.add("run.prompts", lambda: input_checks.check_tokenizer_and_prompts(config, shape))
        if self.rank == 0:
            self.add("run.checkpoints", lambda: input_checks.check_checkpoints(config))
        return hf


def run_checks(options: Options, output: TextIO) -> int:
    """All checks of this rank. Rank 0 prints the report of all; every rank returns its exit code.
    Raises ``InputError`` for a launch without numbers."""
    processes = _number("WORLD_SIZE", 1)
    checks = Checks(options, _number("RANK", 0), _number("LOCAL_RANK", 0), processes)
    if options.config:
        checks.add("config.load", checks.load)
    has_met = processes > 1 and options.world_size is None and checks.check_ranks()
    if checks.local_rank == 0:
        checks.check_host()
    by_rank = _gathered(checks) if has_met else {checks.rank: checks.findings}
    findings = merge(by_rank)
    code = exit_code(findings, allow_warnings=options.allow_warnings)
    if checks.rank == 0:
        with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
            write_text(findings, output)
    return code


def _number(variable: str, default: int) -> int:
    """A number of the launcher's environment. Raises ``InputError``."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise InputError(f"{variable}={text} is not a number; start with torchrun, which sets it")
    return int(text)


def _gathered(checks: Checks) -> Mapping[int, Sequence[Finding]]:
    from megatron_gspo.tools.doctor.ranks import gather_findings

    try:
        return gather_findings(checks.findings)
    except RuntimeError as failure:
        what = f"a rank was lost: {str(failure).splitlines()[0]}"
        fix = "check the logs of the other ranks"
        checks.findings.append(error("ranks.lost", what, "a run would stop there too", fix))
        return {checks.rank: checks.findings}


def _accelerator() -> list[Finding]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    has_nccl = gpus and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return judge_accelerator(torch.version.cuda, names, nccl)


def _check_servers(config: Config, versions: dict[str, Any]) -> list[Finding]:
    """Adds version and device of the servers to ``versions``, for the known issues."""
    from megatron_gspo.tools.doctor import server_checks  # aiohttp may be missing

    engine = config.rollout.engine
    if config.servers.num_servers:
        versions[engine], versions["servers_on_cpu"], findings = server_checks.check_startable(
            config
        )
        return findings
    answers = server_checks.query_servers(config)
    of_servers = [
        numbers(answer.version) for answer in answers.values() if not isinstance(answer, str)
    ]
    versions[engine] = min(of_servers, default=())
    return [
        finding
        for url, answer in answers.items()
        for finding in server_checks.judge_server(config, url, answer)
    ]
