"""What is recorded of a rank's step, operation by operation, whether its tensors are fake or
real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.tools.rehearse.collective_log import CollectiveLog
from megatron_gspo.tools.rehearse.flops import FlopLog
from megatron_gspo.tools.rehearse.host_log import HostLog
from megatron_gspo.tools.rehearse.known_values import KnownValues
from megatron_gspo.tools.rehearse.memory_log import MemoryLog
from megatron_gspo.tools.rehearse.op_log import OpLog


class Recorder(TorchDispatchMode):
    """A mode with the logs of one rank; a subclass defines what an operation returns.

    expert_parallel, imbalance: of the made-up routes, see `routing.expert_ids`. fake_host_bytes:
    host tensors of unknown device values above this size may be fake too; None is never.
    """

    def __init__(self, *, expert_parallel: int = 1, imbalance: float = 1.0) -> None:
        super().__init__()
        self.values = KnownValues()
        self.host = HostLog()
        self.memory = MemoryLog()
        self.flops = FlopLog(self.values)
        self.ops = OpLog()
        self.collectives = CollectiveLog(self.host, self.values)
        self.expert_parallel = expert_parallel
        self.imbalance = imbalance
        self.fake_host_bytes: int | None = None

    @contextlib.contextmanager
    def phase(self, name: str, kind: str) -> Iterator[None]:
        """Within the context everything is recorded under this phase; new device memory is of
        ``kind``.
        """
        before = self.host.phase, self.memory.kind
        self._enter(name)
        self.memory.kind = kind
        try:
            yield
        finally:
            self._enter(before[0])
            self.memory.kind = before[1]

    def _enter(self, phase: str) -> None:
        for log in (self.host, self.memory, self.flops, self.ops):
            log.phase = phase
