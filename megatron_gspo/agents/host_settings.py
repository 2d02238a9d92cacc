"""What an `AgentHost` is built from: plain enough to be sent to the process that hosts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.agents.agent_host import AgentHost
from megatron_gspo.agents.agent_run import RunLimits
from megatron_gspo.agents.endpoint import AgentEndpoint
from megatron_gspo.agents.players import Player, ProgramPlayer, RunnerPlayer
from megatron_gspo.agents.rendering import Rendering
from megatron_gspo.agents.run_queue import RunQueue
from megatron_gspo.agents.run_verifier import RunVerifier
from megatron_gspo.agents.runner import Program
from megatron_gspo.rewards.scorer import RewardScorer
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Runners:
    """Runners that connect by themselves; see `RunQueue` and `RunnerPlayer`."""

    address_file: Path
    lease: float
    run_timeout: float
    key: str | None = None


@dataclass(frozen=True)
class HostSettings:
    """The arguments of an `AgentHost`. Functions that make something must be importable by name, or
    `functools.partial`s of such.

    agent: makes the program that is started for each run. rendering, verifier: make what the host
    gets. listen: see `AgentEndpoint`. nice: is added to the niceness of the process that hosts them,
    and so of the agents and the verifier's workers.
    """

    rendering: Callable[[], Rendering]
    agent: Callable[[], Program] | Runners
    limits: RunLimits
    concurrent_runs: int
    listen: str = "127.0.0.1"
    verifier: Callable[[], RewardScorer] | None = None
    nice: int = 0

    def host(self) -> AgentHost:
        """Build it. Raises InputError for a tokenizer, a program or a verifier that can't be
        used."""
        rendering = self.rendering()
        queue = None
        player: Player
        if isinstance(self.agent, Runners):
            runners = self.agent
            queue = RunQueue(runners.address_file, lease=runners.lease, key=runners.key)
            player = RunnerPlayer(queue, run_timeout=runners.run_timeout)
        else:
            player = ProgramPlayer(self.agent())
        return AgentHost(
            AgentEndpoint(rendering, listen=self.listen, queue=queue, log=logger.info),
            player,
            self.limits,
            concurrent_runs=self.concurrent_runs,
            verifier=None if self.verifier is None else RunVerifier(self.verifier()),
        )
