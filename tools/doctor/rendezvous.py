"""How the ranks find each other before any process group exists, and how the reports are gathered.

Everything goes through the key-value store of the launch, with a deadline for each key: a rank that never arrives, or
dies later, is a finding and not a hang.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_gspo.errors import InputError, RunError, first_line
from megatron_gspo.tools.doctor.diagnostics import SILENT, Finding, Report, error
from megatron_gspo.tools.doctor.rank_checks import RankInfo

_CLOCK_ROUNDS = 3
_POLL = 0.02  # seconds between two checks for a key
_EXTRA = 3.0  # seconds that rank 0 may take beyond its own limit to publish which ranks are present
_LINGER = 5.0  # seconds that the store's host waits for the others to read the exit code
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PortError(RunError):
    """MASTER_PORT is in use on rank 0's host."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The environment variables of a distributed launch: rank, sizes, address of the store.

    agent: torchrun's agent serves the store, not rank 0. attempt: torchrun's restart count.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0
    agent: bool = False
    attempt: str = "0"

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchEnvironment:
        """From the variables that torchrun sets; a single process without them.

        Raises InputError if some are missing or not numbers.
        """
        if "WORLD_SIZE" not in environment:
            return cls()
        if absent := [name for name in _NEEDED if not environment.get(name)]:
            raise InputError(
                f"WORLD_SIZE is set and {absent[0]} is not; start with torchrun, or set {', '.join(_NEEDED)}"
            )
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank = int(environment.get("LOCAL_RANK", rank))
            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        except ValueError as failure:
            raise InputError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be numbers: {failure}") from None
        return cls(
            rank,
            size,
            local_rank,
            local_size,
            environment["MASTER_ADDR"],
            port,
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def open_store(launch: LaunchEnvironment, seconds: float) -> dist.Store:
    """The store of all ranks; rank 0 serves it unless torchrun does. Raises RunError after ``seconds``."""
    serves = launch.rank == 0 and not launch.agent
    try:
        store = dist.TCPStore(
            launch.host,
            launch.port,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as failure:
        where = f"{launch.host}:{launch.port}"
        if serves and "address already in use" in str(failure).lower():
            raise PortError(
                f"MASTER_PORT = {launch.port} is in use on the first rank's host; choose another, or end what "
                "listens there"
            ) from None
        holder = "torchrun" if launch.agent else "the first rank"
        raise RunError(
            f"no store at {where}, where {holder} should serve it, within {seconds:g} s "
            f"({first_line(failure)[:120]}); start it, and check that MASTER_ADDR and MASTER_PORT can be reached"
        ) from None
    return dist.PrefixStore(f"doctor_{launch.attempt}", store)


class Rendezvous:
    """One rank's connection to the others.

    Keys of the store: info/<rank>, present, round/<n>, clock/<n>/<rank>, stage/<rank>, report/<rank>, exit_code, done,
    and the names given to ``all_gather``.
    """

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self.launch, self._store = launch, store
        self.present: list[int] = []  # ranks that arrived
        self.ranks_on_host = 1  # this one included
        self._readers = 0  # ranks that wait for the exit code

    def clone(self) -> Rendezvous:
        """The same rendezvous with its own connection, for another thread: this one may be waiting for a key."""
        other = Rendezvous(self.launch, self._store.clone() if hasattr(self._store, "clone") else self._store)
        other.present, other.ranks_on_host = self.present, self.ranks_on_host
        return other

    def gather_rank_info(self, info: RankInfo, seconds: float) -> list[RankInfo]:
        """The info of all ranks that arrive in time, on the reporting rank; [] on the others. Sets ``present``.

        Rank 0 publishes the list of ranks. If it doesn't, because it never arrived, every rank collects it.
        """
        own = self.launch.rank
        self._store.set(f"info/{own}", json.dumps(info.as_dict()))
        if own != 0 and self._poll("present", seconds + _EXTRA):
            published = json.loads(self._get("present"))
            self.present, self.ranks_on_host = published["ranks"], published["hosts"].get(info.host, 1)
            return []
        found = [
            RankInfo.from_dict(each) for each in self._gather("info", range(self.launch.world_size), seconds).values()
        ]
        self.present = sorted(each.rank for each in found)
        hosts = Counter(each.host for each in found)
        self.ranks_on_host = hosts[info.host]
        if own == 0:
            self._store.set("present", json.dumps({"ranks": self.present, "hosts": hosts}))
        return found if own == self.reporting_rank else []

    @property
    def reporting_rank(self) -> int:
        """The rank that prints the report: the lowest that is present."""
        return min(self.present, default=self.launch.rank)

    def clocks(self, seconds: float) -> dict[int, float]:
        """Seconds by which each rank's clock is ahead of the reporting rank's, on the reporting rank.

        It sets a key, and all ranks read their clocks when they see it: the error is the time that a key takes to
        arrive. The median of several rounds.
        """
        rounds = []
        reports = self.launch.rank == self.reporting_rank
        for number in range(_CLOCK_ROUNDS):
            if reports:
                self._store.set(f"round/{number}", "")
            elif not self._wait(f"round/{number}", seconds):
                return {}
            self._store.set(f"clock/{number}/{self.launch.rank}", json.dumps(time.time()))
            if reports:
                rounds.append(self._gather(f"clock/{number}", self.present, seconds))
        complete = [seen for seen in rounds if len(seen) == len(self.present)]
        if not complete:
            return {}
        own = self.reporting_rank
        return {rank: statistics.median(seen[rank] - seen[own] for seen in complete) for rank in self.present}

    def all_gather(self, name: str, value: Any, seconds: float) -> dict[int, Any] | None:
        """The JSON-able values of all present ranks, on every rank; None if a rank doesn't call it in time.

        All ranks get the same result, so that no rank begins a collective in which another takes no part.
        """
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{name}/{self.launch.rank}", json.dumps(value))
            if self.launch.rank == self.reporting_rank:
                values = self._gather(name, self.present, seconds)
                self._store.set(name, json.dumps(values if len(values) == len(self.present) else None))
        if not self._poll(name, seconds + _EXTRA):
            return None
        values = json.loads(self._get(name) or "null")
        return None if values is None else {int(rank): each for rank, each in values.items()}

    def set_stage(self, stage: str) -> None:
        """Record what this rank begins, for the report in case it dies or hangs."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stage/{self.launch.rank}", stage)

    def send_report(self, report: Report) -> None:
        """Store this rank's report for ``collect_reports``."""
        findings = [asdict(finding) for finding in report.findings]
        with contextlib.suppress(RuntimeError):
            self._store.set(
                f"report/{self.launch.rank}", json.dumps({"findings": findings, "measures": report.measures})
            )

    def collect_reports(self, seconds: float) -> dict[int, Report]:
        """The reports of all present ranks, and an error finding for each rank that sent none in time."""
        found = {
            rank: Report(
                [Finding(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in content["findings"]],
                content["measures"],
            )
            for rank, content in self._gather("report", self.present, seconds).items()
        }
        self._readers = len(set(found) - {self.launch.rank})
        for rank in self.present:
            if rank not in found:
                stage = self._get(f"stage/{rank}") or "nothing"
                silent = error(
                    f"ranks{SILENT}",
                    f"sent no report, the last check that it began: {stage}",
                    "it died or hangs, and so would a run",
                    "check its log",
                )
                found[rank] = Report([silent])
        return found

    def publish_exit_code(self, code: int) -> None:
        """Called by the reporting rank after printing. Waits until the ranks that sent a report have read the code."""
        with contextlib.suppress(RuntimeError):
            self._store.set("exit_code", str(code))
            end = time.monotonic() + _LINGER
            while self._store.add("done", 0) < self._readers and time.monotonic() < end:
                time.sleep(_POLL)

    def wait_exit_code(self, seconds: float) -> int | None:
        """The exit code that the reporting rank published; None if it doesn't in time."""
        if not self._poll("exit_code", seconds):
            return None
        code = int(self._get("exit_code") or 2)
        with contextlib.suppress(RuntimeError):
            self._store.add("done", 1)
        return code

    def _wait(self, key: str, seconds: float) -> bool:
        """As ``_poll``, without the delay of polling; on a timeout torch writes to stderr."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _gather(self, name: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        end, found = time.monotonic() + seconds, {}
        for rank in ranks:
            if self._poll(f"{name}/{rank}", end - time.monotonic()):
                found[rank] = json.loads(self._get(f"{name}/{rank}") or "null")
        return found

    def _poll(self, key: str, seconds: float) -> bool:
        """Whether the key is set within ``seconds``; checked at least once."""
        end = time.monotonic() + seconds
        try:
            while not self._store.check([key]):
                if time.monotonic() > end:
                    return False
                time.sleep(_POLL)
        except RuntimeError:  # the store's host has ended
            return False
        return True

    def _get(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""
