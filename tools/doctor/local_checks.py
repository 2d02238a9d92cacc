"""The checks that one process does without the others."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.config.model_checks import read_hf_config
from megatron_gspo.config.parallel_checks import check_divisibility, check_layout
from megatron_gspo.models import ModelShape
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor import input_checks, issue_checks, machine_checks, sandbox_checks, storage_checks
from megatron_gspo.tools.doctor.arguments import Options
from megatron_gspo.tools.doctor.diagnostics import Finding, Report, examine, failed, note, ok
from megatron_gspo.tools.doctor.gpu_memory import judge_gpu_memory, planned_memory
from megatron_gspo.tools.doctor.rendezvous import LaunchEnvironment
from megatron_gspo.tools.doctor.version_checks import judge_accelerator, judge_versions, numbers


@dataclass
class Local:
    """One rank's local checks. Local rank 0 checks what the ranks of a host share, rank 0 what exists once.

    ranks_on_host: number of ranks on this host. config: the loaded config, None if there is none or it is invalid.
    """

    options: Options
    launch: LaunchEnvironment
    report: Report
    versions: Mapping[str, str | None]
    ranks_on_host: int = 1
    config: Config | None = None
    shape: ModelShape | None = None

    def run(self) -> None:
        gpu, first_here = torch.cuda.is_available(), self.launch.local_rank == 0
        hf: dict[str, Any] = {}
        if self.options.config:
            self._run("config.load", self._load)
        if not first_here:
            return
        self._run("versions.packages", lambda: judge_versions(self.versions, gpu=gpu))
        self._run("versions.cuda", _accelerator)
        self._run("machine.limits", lambda: machine_checks.check_machine(self.ranks_on_host, gpu=gpu))
        if self.config is not None:
            self._run("config.check", self._check)
            hf = self._check_inputs(self.config)
            self._run("machine.gpu_memory", self._gpu_memory)
        self._run("machine.sandbox", lambda: sandbox_checks.check_sandbox(self.config))
        self._run("ports.free", lambda: machine_checks.check_ports(self.config, os.environ))
        self._run("disk.space", lambda: self._disk(gpu))
        servers: dict[str, Any] = {}
        config = self.config
        if self.launch.rank == 0 and config is not None and config.rollout.engine in SERVER_KINDS:
            self._run("servers.answer", lambda: _check_servers(config, servers, with_ranks=bool(self.launch.host)))
        self._run(
            "known_issues.all",
            lambda: issue_checks.check_issues(
                issue_checks.situation(self.versions, self.config, hf, world_size=self._world_size, **servers)
            ),
        )

    @property
    def _world_size(self) -> int:
        return self.options.world_size or self.launch.world_size

    def _run(self, check: str, action: Callable[[], Iterable[Finding]]) -> None:
        self.report.add(*examine(check, action))

    def _load(self) -> list[Finding]:
        overrides, for_servers = split_server_arguments(self.options.overrides)
        self.config = load_config(self.options.config, overrides, server_args=for_servers)
        return []

    def _check(self) -> list[Finding]:
        assert self.config is not None
        size = self._world_size
        try:
            self.config.check(size)
        except ConfigError as failure:
            found = failed("config.check", failure, "a run would stop at its start")
            return [replace(found, fix=found.fix + _launch_hint(failure, size))]
        processes = f"{size} process{'es' if size > 1 else ''}"
        return [ok("config.check", f"{self.options.config}: valid on {processes}")]

    def _check_inputs(self, config: Config) -> dict[str, Any]:
        """The model, the prompts and the run's directory; returns the model's config.json, {} if it can't be read."""
        try:
            hf = read_hf_config(config.model.path)
        except ConfigError:
            hf = {}  # reported by _check
        if hf:
            self._run("model.weights", lambda: self._weights(config))
        if (shape := self.shape) is not None:
            self._run("run.prompts", lambda: input_checks.check_tokenizer_and_prompts(config, shape))
        if self.launch.rank == 0:
            self._run("run.checkpoints", lambda: input_checks.check_checkpoints(config))
        return hf

    def _weights(self, config: Config) -> list[Finding]:
        self.shape, found = input_checks.check_weights(config)
        return found

    def _gpu_memory(self) -> list[Finding]:
        """On a GPU, or for the processes of --world-size."""
        gpu = torch.cuda.is_available()
        if self.config is None or self.shape is None or not (gpu or self.options.world_size):
            return []
        try:
            check_layout(self.config.parallel, self._world_size)
            check_divisibility(self.config.parallel, read_hf_config(self.config.model.path))
        except ConfigError:
            return []  # reported by _check
        available = torch.cuda.get_device_properties(self.launch.local_rank).total_memory if gpu else None
        engine = not gpu or importlib.util.find_spec("transformer_engine") is not None
        memory = planned_memory(self.config, self.shape, self._world_size, transformer_engine=engine)
        found = [judge_gpu_memory(memory, available)]
        if self.config.algorithm.needs_critic and self.config.critic_path != self.config.model.path:
            text = f"the memory above counts the value model {self.config.critic_path} as large as the policy"
            found.append(note("machine.critic_memory", text, "", "see it with megatron-gspo rehearse"))
        return found

    def _disk(self, gpu: bool) -> list[Finding]:
        found = storage_checks.check_shared_memory(self.ranks_on_host, gpu=gpu)
        if self.config is None or self.shape is None:
            return found + storage_checks.check_free_disk()
        return (
            found
            + storage_checks.check_run_disk(self.config, self.shape)
            + storage_checks.check_weight_disk(self.config, self.shape)
        )


def _launch_hint(failure: ConfigError, world_size: int) -> str:
    if "processes" in failure.problem and world_size == 1:
        return ", or start the doctor with torchrun as the run, or pass --world-size N"
    return ""


def _accelerator() -> list[Finding]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else None
    return judge_accelerator(torch.version.cuda, names, nccl)


def _check_servers(config: Config, versions: dict[str, Any], *, with_ranks: bool) -> list[Finding]:
    """Adds version and device of the servers to ``versions``, for the known issues. with_ranks: under a launcher."""
    from megatron_gspo.tools.doctor import server_checks  # aiohttp may be missing

    known = versions if config.rollout.engine == "sglang" else {}  # the known issues are sglang's
    if config.servers.num_servers:
        known["sglang"], known["servers_on_cpu"], found = server_checks.check_startable(config)
        return found
    answers = server_checks.query_servers(config)
    found_versions = [numbers(answer.version) for answer in answers.values() if not isinstance(answer, str)]
    known["sglang"] = min(found_versions, default=())
    own = server_checks.judge_own_address(config) if with_ranks else []
    return server_checks.judge_servers(config, answers) + own
