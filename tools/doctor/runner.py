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
    facts_of_this_rank,
    judge_configs,
    judge_missing,
    judge_ranks,
    judge_shared,
)
from megatron_gspo.tools.doctor.rendezvous import Place, PortError, Rendezvous, open_store
from megatron_gspo.tools.doctor.report import document, write_json, write_text
from megatron_gspo.tools.doctor.version_checks import installed
from megatron_gspo.tools.doctor.watchdog import Watch


@dataclass
class CheckRunner:
    """One rank's way through the checks."""

    options: Options
    output: TextIO
    place: Place = Place()
    report: Report = field(default_factory=Report)
    rendezvous: Rendezvous | None = None
    config: Config | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    can_meet: bool = True  # False once some rank is known to be gone: nothing is exchanged any more
    has_errors: bool = False  # on some rank, as far as the ranks have told each other
    hosts: dict[int, str] = field(default_factory=dict)  # by rank, on the one that speaks
    _at: str = ""
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """All checks; prints the report on one rank and returns the exit code, the same on all."""
        watch = Watch(self._late, self._begin)
        self._place()
        self.versions = installed()
        if self.place.world_size > 1:
            limit = 6 * self.options.seconds + self.options.grace  # beyond what the rendezvous's own limits add up to
            with watch.stage("ranks", limit):
                self._run("ranks.all", self._meet)
        with watch.stage("config", self.options.local_seconds):
            self._alone()
        if self.place.world_size > 1 and self.options.world_size is None and self._all_agree("groups", watch):
            with watch.stage("groups", self.options.seconds):
                self._run("groups.all", self._groups)
        if self.options.probe:
            self._parity(watch)
        watch.close()
        return self._end(self.rendezvous)

    def _run(self, check: str, action: Any) -> None:
        self.report.add(*examine(check, action))

    def _all_agree(self, name: str, watch: Watch) -> bool:
        """Wait until every rank has come here with the same config."""
        if self.rendezvous is None or not self.can_meet:
            return False
        with watch.stage("ranks.waiting", self.options.local_seconds + 2 * self.options.grace):
            said = self.rendezvous.agree(name, self._word(), self.options.local_seconds)
        if said is None:
            self.can_meet = False
            return False
        self.has_errors = any(each["worst"] == "error" for each in said.values())
        apart = [rank for rank, each in said.items() if each["config"] != said[self.rendezvous.speaker]["config"]]
        self.can_meet = not apart and not any(each["ranks"] for each in said.values())
        if self.place.rank == self.rendezvous.speaker:
            places = {rank: tuple(each["run_dir"]) for rank, each in said.items() if each["run_dir"]}
            self.report.add(*judge_configs(apart, self.place.rank), *judge_shared(places, self.hosts))
            if not self.can_meet:
                self.report.add(note("groups.all", "not tried: the ranks' errors come first"))
        return self.can_meet

    def _word(self) -> dict[str, Any]:
        """What this rank tells the others before they begin something together: its worst finding, its config, whether
        the ranks themselves are at fault, and where it sees run_dir."""
        findings, config = self.report.findings, self.config
        wrong = any(measure["wrong"] for measure in self.report.measures)
        text = "" if config is None else config.to_yaml()
        place = existing_part(config.run_dir) if config is not None and self.place.local_rank == 0 else None
        return {
            "worst": "error" if wrong else worst(findings),
            "config": hashlib.sha256(text.encode()).hexdigest(),
            "ranks": any(finding.level == "error" and finding.theme == "ranks" for finding in findings),
            "run_dir": [str(place), place.stat().st_ino] if place is not None else None,
        }

    def _begin(self, stage: str) -> None:
        self._at = stage
        if self.rendezvous is not None:
            self.rendezvous.begin(stage)

    def _place(self) -> None:
        def find() -> list[Finding]:
            self.place = Place.of(os.environ)
            return []

        self._run("ranks.environment", find)

    def _meet(self) -> list[Finding]:
        """Find the other ranks. The one that speaks judges what they say of themselves."""
        seconds = self.options.seconds
        facts = facts_of_this_rank(self.place.rank, self.place.local_rank, self.versions)
        try:
            self.rendezvous = Rendezvous(self.place, open_store(self.place, seconds))
        except PortError as failure:
            self.can_meet = False
            return [failed("ports.master", failure, "the ranks could not meet")]
        except RunError as failure:
            self.can_meet = False
            return [failed("ranks.missing", failure, "the ranks could not meet")]
        everybody = self.rendezvous.roll_call(facts, seconds)
        self.hosts = {fact.rank: fact.host for fact in everybody}
        offsets = self.rendezvous.clocks(seconds)
        missing = judge_missing(self.rendezvous.here, self.place.world_size, seconds)
        self.can_meet = not missing
        if self.place.rank != self.rendezvous.speaker:
            return []
        return [*missing, *judge_ranks(everybody, offsets)]

    def _alone(self) -> None:
        neighbours = self.rendezvous.neighbours if self.rendezvous is not None else self.place.local_size
        local = Local(self.options, self.place, self.report, self.versions, neighbours)
        local.run()
        self.config = local.config

    def _groups(self) -> list[Finding]:
        """Build Megatron's groups as a run does and exchange something on each."""
        from megatron_gspo.config import ParallelConfig
        from megatron_gspo.mcore.process_groups import compute_device, every_group, initialize, shutdown
        from megatron_gspo.tools.doctor.group_checks import Measure, measure_group

        parallel = ParallelConfig()
        if self.config is not None:
            try:
                check_layout(self.config.parallel, self.place.world_size)
                parallel = self.config.parallel
            except ConfigError:
                pass  # said already: without the layout at least the ranks' connections are tried
        minutes = (self.options.seconds + 3 * self.options.grace) / 60  # the watch comes first
        if self.options.probe and self.config is not None:  # the world's group stays for it
            minutes = max(minutes, self.config.parallel.distributed_timeout_minutes)
        initialize(replace(parallel, distributed_timeout_minutes=minutes), seed=0)
        import torch.distributed as dist

        over = dist.get_backend()
        device = compute_device() if over == "nccl" else torch.device("cpu")
        for kind, group in every_group().items():
            self._begin(f"groups.{kind}")
            ranks = tuple(dist.get_process_group_ranks(group))
            alone = Measure(kind, ranks, dist.get_rank(), 0.0, 0.0, backend=over)
            measure = alone if len(ranks) == 1 else measure_group(kind, group, device=device)
            self.report.measures.append(measure.as_dict())
        dist.barrier()
        shutdown(keep_distributed=True)
        return []

    def _parity(self, watch: Watch) -> None:
        config = self.config
        if self.place.world_size > 1:
            broken = not self._all_agree("parity", watch) or self.has_errors
        else:
            broken = worst(self.report.findings) == "error"
        if config is None or broken or self.options.world_size is not None:
            why = "there is no config" if config is None else "other errors come first"
            if self.place.rank == 0:
                self.report.add(note("parity.log_probs", f"--probe: not compared, {why}"))
            return

        def compare() -> list[Finding]:
            from megatron_gspo.tools.doctor.parity_check import check_parity

            found = check_parity(config)
            return found if self.place.rank == 0 else []

        with watch.stage("parity", 60 * config.parallel.distributed_timeout_minutes):
            self._run("parity.log_probs", compare)

    def _late(self, stage: str, seconds: float) -> None:
        """Called by the watch: this rank hangs. Tell what there is and end the process."""
        rendezvous = self.rendezvous.again() if self.rendezvous is not None else None
        self.report.add(
            error(
                f"{stage}{LATE}",
                f"not done after {seconds:g} s, in {self._at}",
                "a run would hang there as well",
                "look at the findings of the other ranks, and at their logs",
            )
        )
        os._exit(self._end(rendezvous))

    def _end(self, rendezvous: Rendezvous | None) -> int:
        """Bring the reports together; the speaking rank prints. Returns the exit code."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the watch is about to end this process
        if rendezvous is None:
            return self._print({self.place.rank: self.report})
        rendezvous.hand_in(self.report)
        patience = self.options.seconds + 3 * self.options.grace
        if self.place.rank == rendezvous.speaker:
            code = self._print(rendezvous.reports(patience))
            rendezvous.announce(code)
            return code
        code_or_none = rendezvous.verdict(2 * patience)
        return exit_code(self.report.findings) or 2 if code_or_none is None else code_or_none

    def _print(self, reports: Mapping[int, Report]) -> int:
        findings = merge({rank: report.findings for rank, report in reports.items()})
        findings = in_order([*findings, *_judge_measures([m for r in reports.values() for m in r.measures])])
        code = exit_code(findings, allow_warnings=self.options.allow_warnings)
        world = self.place.world_size
        with contextlib.suppress(BrokenPipeError):  # whoever reads it has read enough
            if self.options.as_json:
                content = document(findings, world_size=world, config=self.options.config or None, code=code)
                write_json(content, self.output)
            else:
                write_text(findings, self.output)
        return code


def _judge_measures(measures: list[Any]) -> list[Finding]:
    from megatron_gspo.tools.doctor.group_checks import Measure, judge_groups

    return judge_groups([Measure.from_dict(measure) for measure in measures])
