"""The order of the checks on one rank: what needs nobody else first, then the meeting, the groups and the agreement."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch

from megatron_gspo.config import Config, ConfigError, load_config
from megatron_gspo.config.checks import check_layout, read_hf_config
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.conversion import ModelShape
from megatron_gspo.doctor.findings import (
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
    ok,
    worst,
)
from megatron_gspo.doctor.meeting import Meeting, Place, PortError, open_store
from megatron_gspo.doctor.ranks import facts_of_this_rank, judge_missing, judge_ranks
from megatron_gspo.doctor.render import document, write_json, write_text
from megatron_gspo.doctor.versions import installed, judge_accelerator, judge_versions
from megatron_gspo.doctor.watch import Watch
from megatron_gspo.errors import RunError

_LOCAL_SECONDS = 600.0  # for all that this rank does alone: reading prompts takes longest
_GRACE = 10.0  # seconds beyond a limit that the others' reports may take


@dataclass(frozen=True)
class Options:
    """Of the command line. config: file; "" for the machine alone. seconds: that the ranks may take to meet, and to
    exchange something on all groups. world_size: to check the config for; None: as many as there are."""

    config: str = ""
    overrides: tuple[str, ...] = ()
    as_json: bool = False
    probe: bool = False
    allow_warnings: bool = False
    seconds: float = 60.0
    world_size: int | None = None


@dataclass
class Checkup:
    """One rank's way through the checks."""

    options: Options
    output: TextIO
    place: Place = Place()
    report: Report = field(default_factory=Report)
    meeting: Meeting | None = None
    config: Config | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    can_meet: bool = True  # False once some rank is known to be gone: nothing is exchanged any more
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """All checks; prints the report on one rank and returns the exit code, the same on all."""
        watch = Watch(self._late, self._begin)
        self._place()
        self.versions = installed()
        if self.place.world_size > 1:
            with watch.stage("ranks", 6 * self.options.seconds + _GRACE):  # beyond what its own limits add up to
                self._run("ranks", self._meet)
        with watch.stage("config", _LOCAL_SECONDS):
            self._local()
        if self.place.world_size > 1 and self.can_meet and self.options.world_size is None:
            with watch.stage("groups", self.options.seconds):
                self._run("groups", self._groups)
        if self.options.probe:
            self._agreement(watch)
        watch.close()
        return self._end(self.meeting)

    def _run(self, check: str, action: Any) -> None:
        self.report.add(*examine(check, action))

    def _begin(self, stage: str) -> None:
        if self.meeting is not None:
            self.meeting.begin(stage)

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
            self.meeting = Meeting(self.place, open_store(self.place, seconds))
        except PortError as failure:
            self.can_meet = False
            return [failed("ports.master", failure, "the ranks could not meet")]
        except RunError as failure:
            self.can_meet = False
            return [failed("ranks.missing", failure, "the ranks could not meet")]
        everybody = self.meeting.roll_call(facts, seconds)
        offsets = self.meeting.clocks(seconds)
        missing = judge_missing(self.meeting.here, self.place.world_size, seconds)
        self.can_meet = not missing
        if self.place.rank != self.meeting.speaker:
            return []
        return [*missing, *judge_ranks(everybody, offsets)]

    def _local(self) -> None:
        """What needs no other rank. The first rank of each host looks at what all of them share."""
        gpu = torch.cuda.is_available()
        if self.place.local_rank == 0:
            self._run("versions", lambda: judge_versions(self.versions, gpu=gpu))
            self._run("versions.cuda", _accelerator)
        if self.options.config:
            self._run("config", self._load)
        shape, hf = self._inputs()
        if self.place.local_rank == 0:
            self._run("machine", lambda: _machine(self._ranks_here(), gpu))
            self._run("ports", lambda: _ports(self.config))
            self._run("disk", lambda: _disk(self.config, shape, self._ranks_here(), gpu))
        servers: dict[str, Any] = {}
        if self.place.rank == 0 and self.config is not None and self.config.rollout.engine == "sglang":
            self._run("servers", lambda: _servers(self.config, servers))
        if self.place.local_rank == 0:
            self._run("defects", lambda: _defects(self.versions, self.config, hf, self._world_size, servers))

    @property
    def _world_size(self) -> int:
        return self.options.world_size or self.place.world_size

    def _ranks_here(self) -> int:
        return self.meeting.neighbours if self.meeting is not None else self.place.local_size

    def _load(self) -> list[Finding]:
        overrides, for_servers = split_server_arguments(self.options.overrides)
        self.config = load_config(self.options.config, overrides, server_arguments=for_servers)
        if self.place.local_rank != 0:
            return []
        try:
            self.config.check(self._world_size)
        except ConfigError as failure:
            found = failed("config.check", failure, "a run would refuse it at its start")
            return [replace(found, fix=found.fix + _for_world(failure, self.place))]
        return [
            ok(
                "config.check",
                f"{self.options.config}: nothing contradicts itself on {self._world_size} "
                f"process{'es' if self._world_size > 1 else ''}",
            )
        ]

    def _inputs(self) -> tuple[ModelShape | None, dict[str, Any]]:
        """Look at the model, the prompts and the run's directory; (the model's sizes, its config.json) where they are
        readable."""
        config = self.config
        shapes: list[ModelShape] = []
        if config is None:
            return None, {}
        hf: dict[str, Any] = {}
        try:
            hf = read_hf_config(config.model.path)
        except ConfigError:
            return None, {}  # Config.check has said it

        def weights() -> list[Finding]:
            from megatron_gspo.doctor import inputs

            shape, found = inputs.check_weights(config)
            shapes.append(shape)
            return found

        def rest() -> list[Finding]:
            from megatron_gspo.doctor import inputs

            return inputs.check_tokenizer_and_prompts(config, shapes[0]) if shapes else []

        def checkpoints() -> list[Finding]:
            from megatron_gspo.doctor import inputs

            return inputs.check_checkpoints(config)

        if self.place.local_rank == 0:
            self._run("model.weights", weights)
            self._run("run.prompts", rest)
        if self.place.rank == 0:
            self._run("run.checkpoints", checkpoints)
        return (shapes[0] if shapes else None), hf

    def _groups(self) -> list[Finding]:
        """Build Megatron's groups as a run does and exchange something on each."""
        from megatron_gspo.doctor.groups import Measure, measure_group
        from megatron_gspo.loop.assemble import layout_of
        from megatron_gspo.mcore.groups import Layout, compute_device, every_group, initialize, shutdown

        layout, backend = Layout(), "auto"
        if self.config is not None:
            try:
                check_layout(self.config.parallel, self.place.world_size)
                layout, backend = layout_of(self.config), self.config.parallel.backend
            except ConfigError:
                pass  # said already: without the layout at least the ranks' connections are tried
        initialize(layout, seed=0, backend=backend, timeout_minutes=(self.options.seconds + 3 * _GRACE) / 60)
        import torch.distributed as dist

        over = dist.get_backend()
        device = compute_device() if over == "nccl" else torch.device("cpu")
        for kind, group in every_group().items():
            if self.meeting:
                self.meeting.begin(f"groups.{kind}")
            ranks = tuple(dist.get_process_group_ranks(group))
            alone = Measure(kind, ranks, dist.get_rank(), 0.0, 0.0, backend=over)
            measure = alone if len(ranks) == 1 else measure_group(kind, group, device=device)
            self.report.measures.append(measure.as_dict())
        dist.barrier()
        shutdown(keep_distributed=True)
        return []

    def _agreement(self, watch: Watch) -> None:
        config = self.config
        broken = worst(self.report.findings) == "error" or not self.can_meet
        if config is None or broken or self.options.world_size is not None:
            why = "there is no config" if config is None else "other errors come first"
            self.report.add(note("agreement.log_probs", f"--probe: not compared, {why}"))
            return

        def compare() -> list[Finding]:
            from megatron_gspo.doctor.agreement import check_agreement

            found = check_agreement(config)
            return found if self.place.rank == 0 else []

        with watch.stage("agreement", 60 * config.parallel.timeout_minutes):
            self._run("agreement", compare)

    def _late(self, stage: str, seconds: float) -> None:
        """Called by the watch: this rank hangs. Tell what there is and end the process."""
        meeting = self.meeting.again() if self.meeting is not None else None
        self.report.add(
            error(
                f"{stage}{LATE}",
                f"not done after {seconds:g} s",
                "a run would hang there as well",
                "look at the findings of the other ranks, and at their logs",
            )
        )
        os._exit(self._end(meeting))

    def _end(self, meeting: Meeting | None) -> int:
        """Bring the reports together; the speaking rank prints. Returns the exit code."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the watch is about to end this process
        if meeting is None:
            return self._print({self.place.rank: self.report})
        meeting.hand_in(self.report)
        patience = self.options.seconds + 3 * _GRACE
        if self.place.rank == meeting.speaker:
            code = self._print(meeting.reports(patience))
            meeting.announce(code)
            return code
        code_or_none = meeting.verdict(2 * patience)
        return exit_code(self.report.findings) or 2 if code_or_none is None else code_or_none

    def _print(self, reports: Mapping[int, Report]) -> int:
        findings = merge({rank: report.findings for rank, report in reports.items()})
        findings = in_order([*findings, *_judge_measures([m for r in reports.values() for m in r.measures])])
        code = exit_code(findings, allow_warnings=self.options.allow_warnings)
        world = self.place.world_size
        if self.options.as_json:
            write_json(document(findings, world_size=world, config=self.options.config or None, code=code), self.output)
        else:
            write_text(findings, self.output)
        return code


def _judge_measures(measures: list[Any]) -> list[Finding]:
    from megatron_gspo.doctor.groups import Measure, judge_groups

    return judge_groups([Measure.from_dict(measure) for measure in measures])


def _for_world(failure: ConfigError, place: Place) -> str:
    if "processes" in failure.problem and place.world_size == 1:
        return ", or start the doctor as the run, with torchrun, or say --world-size N"
    return ""


def _accelerator() -> list[Finding]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else None
    return judge_accelerator(torch.version.cuda, names, nccl)


def _machine(ranks: int, gpu: bool) -> list[Finding]:
    from megatron_gspo.doctor.machine import check_machine

    return check_machine(ranks, gpu=gpu)


def _ports(config: Config | None) -> list[Finding]:
    from megatron_gspo.doctor.machine import check_ports

    return check_ports(config, os.environ)


def _disk(config: Config | None, shape: ModelShape | None, ranks: int, gpu: bool) -> list[Finding]:
    from megatron_gspo.doctor import storage

    found = storage.check_shared_memory(ranks, gpu=gpu)
    if config is None or shape is None:
        return found + storage.check_free_disk()
    return found + storage.check_run_disk(config, shape) + storage.check_weight_disk(config, shape)


def _servers(config: Config | None, told: dict[str, Any]) -> list[Finding]:
    """`told` gets version and device of the servers, for the known defects."""
    from megatron_gspo.doctor import servers
    from megatron_gspo.doctor.versions import numbers

    assert config is not None
    if config.sglang.servers:
        told["version"], told["cpu"], found = servers.check_startable(config)
        return found
    answers = servers.ask(config)
    versions = [numbers(answer.version) for answer in answers.values() if not isinstance(answer, str)]
    told["version"], told["cpu"] = min(versions, default=()), False
    return servers.judge_servers(config, answers)


def _defects(
    versions: Mapping[str, str | None],
    config: Config | None,
    hf: Mapping[str, Any],
    world_size: int,
    servers: Mapping[str, Any],
) -> list[Finding]:
    from megatron_gspo.doctor import defects

    return defects.check_defects(
        defects.situation(
            versions,
            config,
            hf,
            world_size=world_size,
            sglang=servers.get("version", ()),
            servers_on_cpu=servers.get("cpu", False),
        )
    )
