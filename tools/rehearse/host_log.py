"""Where the host waits for the device, what it copies to it, and what is wrong: counted by call
site.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_gspo.tools.rehearse.call_sites import Frames, call_site, frames_above
from megatron_gspo.tools.rehearse.records import FINDINGS, Finding, HostCopy, HostSync


@dataclass
class HostLog:
    """phase: the current one, set by the rehearsal."""

    phase: str = "build"
    _syncs: Counter[tuple[str, str, Frames]] = field(default_factory=Counter)
    _copies: Counter[tuple[str, bool, bool, Frames]] = field(default_factory=Counter)
    _copied: Counter[tuple[str, bool, bool, Frames]] = field(default_factory=Counter)
    _findings: Counter[tuple[str, str, str, Frames]] = field(default_factory=Counter)

    def sync(self, kind: str) -> None:
        """The host waits for the device."""
        self._syncs[self.phase, kind, frames_above(2)] += 1

    def copy(self, size: int, *, pinned: bool, blocking: bool) -> None:
        """``size`` bytes go from host to device."""
        key = self.phase, pinned, blocking, frames_above(2)
        self._copies[key] += 1
        self._copied[key] += size

    def find(self, kind: str, message: str) -> None:
        """Something is wrong, or a value was made up; ``kind`` is one of ``FINDINGS``."""
        assert kind in FINDINGS, kind
        self._findings[self.phase, kind, message, frames_above(2)] += 1

    @property
    def syncs(self) -> tuple[HostSync, ...]:
        return tuple(
            HostSync(kind, call_site(frames), phase, count)
            for (phase, kind, frames), count in self._syncs.items()
        )

    @property
    def copies(self) -> tuple[HostCopy, ...]:
        return tuple(
            HostCopy(self._copied[key], key[1], key[2], call_site(key[3]), key[0], count)
            for key, count in self._copies.items()
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(kind, message, call_site(frames), phase, count)
            for (phase, kind, message, frames), count in self._findings.items()
        )
