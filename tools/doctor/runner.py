"""The order of the checks on one rank: local checks, rendezvous, process groups, parity check."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.parallel_checks import check_layout
from megatron_gspo.errors import RunError, existing_part
from megatron_gspo.tools.doctor.arguments import Options
from megatron_gspo.tools.doctor.diagnostics import (
    LATE,
    Finding,
    Report,
    error,
    examine,
    exit_code,
    failed,
    in_order,
    merge,
    note,
    worst,
)
from megatron_gspo.tools.doctor.local_checks import Local
from megatron_gspo.tools.doctor.rank_checks import (
    judge_configs,
    judge_missing,
    judge_ranks,
    judge_shared,
    local_rank_info,
)
from megatron_gspo.tools.doctor.rendezvous import LaunchEnvironment, PortError, Rendezvous, open_store
from megatron_gspo.tools.doctor.report import document, write_json, write_text
from megatron_gspo.tools.doctor.version_checks import installed
from megatron_gspo.tools.doctor.watchdog import Watchdog


@dataclass
class CheckRunner:
    """One rank's run of the checks, and what they have found so far."""

    options: Options
    output: TextIO
    launch: LaunchEnvironment = LaunchEnvironment()
    report: Report = field(default_factory=Report)
    rendezvous: Rendezvous | None = None
    config: Config | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    can_communicate: bool = True  # False once a rank is known to be lost: no further exchange
    has_errors: bool = False  # on some rank, as of the last exchange
    hosts: dict[int, str] = field(default_factory=dict)  # by rank, on the reporting rank
    _stage: str = ""
    _finishing: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """Run all checks. The reporting rank prints the report; all ranks return the same exit code."""
        watch = Watchdog(self._on_timeout, self._set_stage)
        self._read_environment()
        self.versions = installed()
        if self.launch.world_size > 1:
            limit = 6 * self.options.seconds + self.options.grace  # above the sum of the rendezvous' own limits
            with watch.stage("ranks", limit):
                self._run("ranks.all", self._join_ranks)
        with watch.stage("config", self.options.local_seconds):
            self._check_locally()
        if self.launch.world_size > 1 and self.options.world_size is None and self._all_ready("groups", watch):
            with watch.stage("groups", self.options.seconds):
                self._run("groups.all", self._check_groups)
        if self.options.probe:
            self._check_parity(watch)
        watch.close()
        return self._finish(self.rendezvous)

    def _run(self, check: str, action: Any) -> None:
        self.report.add(*examine(check, action))

    def _all_ready(self, name: str, watch: Watchdog) -> bool:
        """Wait for all ranks; True if all have the same config and none has an error in its ``ranks`` checks."""
        if self.rendezvous is None or not self.can_communicate:
            return False
        with watch.stage("ranks.waiting", self.options.local_seconds + 2 * self.options.grace):
            states = self.rendezvous.all_gather(name, self._state(), self.options.local_seconds)
        if states is None:
            self.can_communicate = False
            return False
        self.has_errors = any(each["worst"] == "error" for each in states.values())
        reporting = self.rendezvous.reporting_rank
        differing = [rank for rank, each in states.items() if each["config"] != states[reporting]["config"]]
        self.can_communicate = not differing and not any(each["ranks"] for each in states.values())
        if self.launch.rank == reporting:
            places = {rank: tuple(each["run_dir"]) for rank, each in states.items() if each["run_dir"]}
            self.report.add(*judge_configs(differing, self.launch.rank), *judge_shared(places, self.hosts))
            if not self.can_communicate:
                self.report.add(note("groups.all", "skipped because of the ranks' errors"))
        return self.can_communicate

    def _state(self) -> dict[str, Any]:
        """What the ranks compare before a collective check: worst level, hash of the config, whether there is an error
        of the ranks themselves, and the deepest existing part of run_dir with its inode."""
        findings, config = self.report.findings, self.config
        wrong = any(measure["wrong"] for measure in self.report.measures)
        text = "" if config is None else config.to_yaml()
        place = existing_part(config.run_dir) if config is not None and self.launch.local_rank == 0 else None
        return {
            "worst": "error" if wrong else worst(findings),
            "config": hashlib.sha256(text.encode()).hexdigest(),
            "ranks": any(finding.level == "error" and finding.theme == "ranks" for finding in findings),
            "run_dir": [str(place), place.stat().st_ino] if place is not None else None,
        }

    def _set_stage(self, stage: str) -> None:
        self._stage = stage
        if self.rendezvous is not None:
            self.rendezvous.set_stage(stage)

    def _read_environment(self) -> None:
        def find() -> list[Finding]:
            self.launch = LaunchEnvironment.read(os.environ)
            return []

        self._run("ranks.environment", find)

    def _join_ranks(self) -> list[Finding]:
        """Find the other ranks. The reporting rank compares their info."""
        seconds = self.options.seconds
        info = local_rank_info(self.launch.rank, self.launch.local_rank, self.versions)
        try:
            self.rendezvous = Rendezvous(self.launch, open_store(self.launch, seconds))
        except PortError as failure:
            self.can_communicate = False
            return [failed("ports.master", failure, "the ranks could not find each other")]
        except RunError as failure:
            self.can_communicate = False
            return [failed("ranks.missing", failure, "the ranks could not find each other")]
        infos = self.rendezvous.gather_rank_info(info, seconds)
        self.hosts = {each.rank: each.host for each in infos}
        offsets = self.rendezvous.clocks(seconds)
        missing = judge_missing(self.rendezvous.present, self.launch.world_size, seconds)
        self.can_communicate = not missing
        if self.launch.rank != self.rendezvous.reporting_rank:
            return []
        return [*missing, *judge_ranks(infos, offsets)]

    def _check_locally(self) -> None:
        ranks_on_host = self.rendezvous.ranks_on_host if self.rendezvous is not None else self.launch.local_size
        local = Local(self.options, self.launch, self.report, self.versions, ranks_on_host)
        local.run()
        self.config = local.config

    def _check_groups(self) -> list[Finding]:
        """Build Megatron's process groups as a run does and run a collective on each."""
        from megatron_gspo.config import ParallelConfig
        from megatron_gspo.mcore.process_groups import compute_device, every_group, initialize, shutdown
        from megatron_gspo.tools.doctor.group_checks import Measure, measure_group

        parallel = ParallelConfig()
        if self.config is not None:
            try:
                check_layout(self.config.parallel, self.launch.world_size)
                parallel = self.config.parallel
            except ConfigError:
                pass  # reported already; without a valid layout the connections are still checked
        minutes = (self.options.seconds + 3 * self.options.grace) / 60  # the watchdog ends first
        if self.options.probe and self.config is not None:  # the parity check keeps using the default group
            minutes = max(minutes, self.config.parallel.distributed_timeout_minutes)
        initialize(replace(parallel, distributed_timeout_minutes=minutes), seed=0)
        import torch.distributed as dist

        over = dist.get_backend()
        device = compute_device() if over == "nccl" else torch.device("cpu")
        for kind, group in every_group().items():
            self._set_stage(f"groups.{kind}")
            ranks = tuple(dist.get_process_group_ranks(group))
            alone = Measure(kind, ranks, dist.get_rank(), 0.0, 0.0, backend=over)
            measure = alone if len(ranks) == 1 else measure_group(kind, group, device=device)
            self.report.measures.append(measure.as_dict())
        dist.barrier()
        shutdown(keep_distributed=True)
        return []

    def _check_parity(self, watch: Watchdog) -> None:
        config = self.config
        if self.launch.world_size > 1:
            broken = not self._all_ready("parity", watch) or self.has_errors
        else:
            broken = worst(self.report.findings) == "error"
        if config is None or broken or self.options.world_size is not None:
            why = "there is no config" if config is None else "fix the other errors first"
            if self.launch.rank == 0:
                self.report.add(note("parity.log_probs", f"--probe: not compared, {why}"))
            return

        def compare() -> list[Finding]:
            from megatron_gspo.tools.doctor.parity_check import check_parity

            found = check_parity(config)
            return found if self.launch.rank == 0 else []

        with watch.stage("parity", 60 * config.parallel.distributed_timeout_minutes):
            self._run("parity.log_probs", compare)

    def _on_timeout(self, stage: str, seconds: float) -> None:
        """Called by the watchdog: this rank hangs. Send its report and end the process."""
        rendezvous = self.rendezvous.clone() if self.rendezvous is not None else None
        self.report.add(
            error(
                f"{stage}{LATE}",
                f"not done after {seconds:g} s, in {self._stage}",
                "a run would hang there as well",
                "check the findings and the logs of the other ranks",
            )
        )
        os._exit(self._finish(rendezvous))

    def _finish(self, rendezvous: Rendezvous | None) -> int:
        """Gather the reports, print them on the reporting rank and return the exit code."""
        if not self._finishing.acquire(blocking=False):
            threading.Event().wait()  # the watchdog is about to end this process
        if rendezvous is None:
            return self._print({self.launch.rank: self.report})
        rendezvous.send_report(self.report)
        patience = self.options.seconds + 3 * self.options.grace
        if self.launch.rank == rendezvous.reporting_rank:
            code = self._print(rendezvous.collect_reports(patience))
            rendezvous.publish_exit_code(code)
            return code
        code_or_none = rendezvous.wait_exit_code(2 * patience)
        return exit_code(self.report.findings) or 2 if code_or_none is None else code_or_none

    def _print(self, reports: Mapping[int, Report]) -> int:
        findings = merge({rank: report.findings for rank, report in reports.items()})
        findings = in_order([*findings, *_judge_measures([m for r in reports.values() for m in r.measures])])
        code = exit_code(findings, allow_warnings=self.options.allow_warnings)
        world = self.launch.world_size
        with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
            if self.options.as_json:
                content = document(findings, world_size=world, config=self.options.config or None, code=code)
                write_json(content, self.output)
            else:
                write_text(findings, self.output)
        return code


def _judge_measures(measures: list[Any]) -> list[Finding]:
    from megatron_gspo.tools.doctor.group_checks import Measure, judge_groups

    return judge_groups([Measure.from_dict(measure) for measure in measures])
