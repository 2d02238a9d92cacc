"""How the ranks find each other before there is any process group, and how their reports come together.

Everything goes through the store of the rendezvous, key by key with a deadline: a rank that never arrives, or dies
later, is a finding and not a hang.
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
from megatron_gspo.tools.doctor.rank_checks import RankFacts

_FLASHES = 3
_POLL = 0.02  # seconds between two looks for a key
_LATE = 3.0  # seconds that the first rank may take beyond its limit to say who is here
_LINGER = 5.0  # seconds that the store's host stays for the others to read the verdict
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PortError(RunError):
    """MASTER_PORT is taken on the first rank's host."""


@dataclass(frozen=True)
class Place:
    """Where this process stands: rank, world size, the store's address; agent: torchrun holds the store."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0
    agent: bool = False
    attempt: str = "0"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """As torchrun says, or whoever sets its variables. Raises InputError where some are missing or no numbers."""
        if "WORLD_SIZE" not in environment:
            return cls()
        if absent := [name for name in _NEEDED if not environment.get(name)]:
            raise InputError(
                f"{absent[0]} is not set beside WORLD_SIZE; start with torchrun, or set {', '.join(_NEEDED)}"
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


def open_store(place: Place, seconds: float) -> dist.Store:
    """The store of all ranks; the first one serves it unless torchrun does. Raises RunError after so many seconds."""
    serves = place.rank == 0 and not place.agent
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as failure:
        where = f"{place.host}:{place.port}"
        if serves and "address already in use" in str(failure).lower():
            raise PortError(
                f"MASTER_PORT = {place.port} is in use on the first rank's host; choose another, or end what "
                "listens there"
            ) from None
        holder = "torchrun" if place.agent else "the first rank"
        raise RunError(
            f"no store at {where}, where {holder} should serve it, within {seconds:g} s "
            f"({first_line(failure)[:120]}); start it, and see that MASTER_ADDR and MASTER_PORT can be reached"
        ) from None
    return dist.PrefixStore(f"doctor_{place.attempt}", store)


class Rendezvous:
    """This rank's side of the exchange. Keys: here/<rank>, roll, flash/<n>, clock/<n>/<rank>, stage/<rank>,
    report/<rank>, verdict, and the names of agreements."""

    def __init__(self, place: Place, store: dist.Store) -> None:
        self.place, self._store = place, store
        self.here: list[int] = []
        self._awaited = 0  # ranks that wait for the verdict
        self.neighbours = 1  # ranks on this host, this one included

    def again(self) -> Rendezvous:
        """A rendezvous over a connection of its own, for another thread: the first may wait for a key."""
        other = Rendezvous(self.place, self._store.clone() if hasattr(self._store, "clone") else self._store)
        other.here, other.neighbours = self.here, self.neighbours
        return other

    def roll_call(self, facts: RankFacts, seconds: float) -> list[RankFacts]:
        """The facts of all ranks that arrive in time, on the speaker; [] on the others, who learn from it who is here.

        The first rank calls the roll. Where it doesn't, because it never arrived, every rank does for itself.
        """
        own = self.place.rank
        self._store.set(f"here/{own}", json.dumps(facts.as_dict()))
        if own != 0 and self._arrives("roll", seconds + _LATE):
            roll = json.loads(self._get("roll"))
            self.here, self.neighbours = roll["here"], roll["hosts"].get(facts.host, 1)
            return []
        found = [
            RankFacts.from_dict(each) for each in self._gather("here", range(self.place.world_size), seconds).values()
        ]
        self.here = sorted(fact.rank for fact in found)
        hosts = Counter(fact.host for fact in found)
        self.neighbours = hosts[facts.host]
        if own == 0:
            self._store.set("roll", json.dumps({"here": self.here, "hosts": hosts}))
        return found if own == self.speaker else []

    @property
    def speaker(self) -> int:
        """The rank that prints: the first one that is here."""
        return min(self.here, default=self.place.rank)

    def clocks(self, seconds: float) -> dict[int, float]:
        """Seconds that each rank's clock is ahead of the speaker's, on the speaker.

        It gives signs at which all look at their clocks: the error is the time that a sign takes to arrive."""
        rounds = []
        for number in range(_FLASHES):
            if self.place.rank == self.speaker:
                self._store.set(f"flash/{number}", "")
            elif not self._signal(f"flash/{number}", seconds):
                return {}
            self._store.set(f"clock/{number}/{self.place.rank}", json.dumps(time.time()))
            if self.place.rank == self.speaker:
                rounds.append(self._gather(f"clock/{number}", self.here, seconds))
        complete = [seen for seen in rounds if len(seen) == len(self.here)]
        return (
            {rank: statistics.median(seen[rank] - seen[self.speaker] for seen in complete) for rank in self.here}
            if complete
            else {}
        )

    def agree(self, name: str, value: Any, seconds: float) -> dict[int, Any] | None:
        """What every rank says (JSON-able), on every rank, once all have come to this place; None where one doesn't in
        time. No rank begins an exchange that another won't take part in."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{name}/{self.place.rank}", json.dumps(value))
            if self.place.rank == self.speaker:
                said = self._gather(name, self.here, seconds)
                self._store.set(name, json.dumps(said if len(said) == len(self.here) else None))
        if not self._arrives(name, seconds + _LATE):
            return None
        said = json.loads(self._get(name) or "null")
        return None if said is None else {int(rank): value for rank, value in said.items()}

    def begin(self, stage: str) -> None:
        """Leave word of what this rank is doing, for the others should it not come back."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stage/{self.place.rank}", stage)

    def hand_in(self, report: Report) -> None:
        findings = [asdict(finding) for finding in report.findings]
        with contextlib.suppress(RuntimeError):
            self._store.set(
                f"report/{self.place.rank}", json.dumps({"findings": findings, "measures": report.measures})
            )

    def reports(self, seconds: float) -> dict[int, Report]:
        """The reports of all ranks that are here; a finding in place of one that doesn't come."""
        found = {
            rank: Report(
                [Finding(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in content["findings"]],
                content["measures"],
            )
            for rank, content in self._gather("report", self.here, seconds).items()
        }
        self._awaited = len(set(found) - {self.place.rank})
        for rank in self.here:
            if rank not in found:
                stage = self._get(f"stage/{rank}") or "nothing"
                found[rank] = Report(
                    [
                        error(
                            f"ranks{SILENT}",
                            f"said nothing more, the last that it began: {stage}",
                            "it died or hangs, and so would a run",
                            "look at its log",
                        )
                    ]
                )
        return found

    def announce(self, code: int) -> None:
        """The speaker has printed: let the others leave with this exit code, and stay until those that have handed in
        a report have read it."""
        with contextlib.suppress(RuntimeError):
            self._store.set("verdict", str(code))
            end = time.monotonic() + _LINGER
            while self._store.add("left", 0) < self._awaited and time.monotonic() < end:
                time.sleep(0.02)

    def verdict(self, seconds: float) -> int | None:
        """The exit code that the speaker announced; None where it doesn't in time."""
        if not self._arrives("verdict", seconds):
            return None
        code = int(self._get("verdict") or 2)
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)
        return code

    def _signal(self, key: str, seconds: float) -> bool:
        """As `_arrives`, without the delay of looking now and then; torch says so on the error stream if it fails."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _gather(self, name: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        end, found = time.monotonic() + seconds, {}
        for rank in ranks:
            if self._arrives(f"{name}/{rank}", end - time.monotonic()):
                found[rank] = json.loads(self._get(f"{name}/{rank}") or "null")
        return found

    def _arrives(self, key: str, seconds: float) -> bool:
        """Whether the key is there within so many seconds; at least one look."""
        end = time.monotonic() + seconds
        try:
            while not self._store.check([key]):
                if time.monotonic() > end:
                    return False
                time.sleep(_POLL)
        except RuntimeError:  # the store's host is gone
            return False
        return True

    def _get(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""
