"""Findings of the doctor."""

from __future__ import annotations

from megatron_gspo.tools.doctor.findings import (
    error,
    warning,
)

WARNING = warning("run.start", "1 GiB free", "it fills up", "free some")
ERROR = error("config.check", "seed = -1", "a run refuses it", "set 0")
