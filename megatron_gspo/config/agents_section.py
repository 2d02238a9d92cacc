"""Section `agents`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.paths import UserPath


@dataclass(frozen=True, kw_only=True)
class AgentsConfig:
    """Agents that call the policy through an endpoint beside the trainer (docs/agents.md)."""

    command: tuple[str, ...] = ()
    """Program of a run and its arguments (docs/agents.md)."""
    function: UserPath | None = None
    """Import path of the agent, a Python function."""
    external: bool = False
    """Let runners claim the runs (docs/agents.md)."""
    python: UserPath | None = None
    """Interpreter that runs `function`; null is the trainer's."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the agent."""
    concurrent_runs: Annotated[int, Ge(1)] = 64
    """Agents of a rank at the same time."""
    nice: Annotated[int, Ge(0), Le(19)] = 10
    """Niceness added to the endpoint, its agents and their verifier."""
    run_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds until an agent is killed, or a runner loses its run."""
    lease: Annotated[float, Gt(0)] = 60.0
    """Seconds without a request after which a runner loses its run."""
    runner_key_file: UserPath | None = None
    """File whose first line is the runners' key; null draws one."""
    max_calls: Annotated[int, Ge(1)] = 100
    """Maximum calls of a run."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Maximum tokens of a call's messages and reply; null is `data.max_prompt_length` +
    `rollout.max_response_length`."""
    max_run_tokens: Annotated[int, Ge(2)] | None = None
    """Maximum tokens of a run's branches; null is what a micro-batch holds."""
    thinking: Literal["template", "keep"] = "template"
    """Drop earlier reasoning where the chat template does, or keep it."""
    renderer: str | None = None
    """Name in the package `renderers`, e.g. glm-4.5; null is the chat template."""
    listen: str = "127.0.0.1"
    """Address of the endpoint, e.g. 0.0.0.0 for agents on other machines."""

    @property
    def is_on(self) -> bool:
        """Whether samples are runs of agents."""
        return bool(self.command) or self.function is not None or self.external
