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
    """Program that is started for each run, and its arguments; {prompt}, {task_file} and other
    names are filled in."""
    function: UserPath | None = None
    """Import path of a Python function that is the agent, in place of `command`."""
    external: bool = False
    """Whether runners that connect by themselves play the runs (docs/agents.md)."""
    python: UserPath | None = None
    """Interpreter that runs `function`, with the agent's packages; null is the trainer's."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the agent (docs/agents.md)."""
    concurrent_runs: Annotated[int, Ge(1)] = 64
    """Agents that a rank runs at the same time."""
    nice: Annotated[int, Ge(0), Le(19)] = 10
    """Added to the niceness of the endpoint's process, of the agents that it starts and of their
    verifier: the training step goes before them."""
    run_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds after which an agent is ended with all its processes, and a runner loses its run."""
    lease: Annotated[float, Gt(0)] = 60.0
    """Seconds without a request after which the run of a runner is given to another one."""
    runner_key_file: UserPath | None = None
    """File with the key of runners on its first line; null draws one at each start."""
    max_calls: Annotated[int, Ge(1)] = 100
    """Calls of a run."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Tokens of a call's messages and reply; null is `data.max_prompt_length` +
    `rollout.max_response_length`."""
    max_run_tokens: Annotated[int, Ge(2)] | None = None
    """Tokens of all branches of a run; null is what a micro-batch holds."""
    thinking: Literal["template", "keep"] = "template"
    """Whether earlier reasoning leaves the prompt as the chat template says, or stays; also for
    environments with tools."""
    renderer: str | None = None
    """Name in the package `renderers`, e.g. glm-4.5; null is the tokenizer's chat template.
    Also for environments with tools."""
    listen: str = "127.0.0.1"
    """Address of the endpoint. Agents on other machines need another one than the loopback."""

    @property
    def is_on(self) -> bool:
        """Whether samples are runs of agents."""
        return bool(self.command) or self.function is not None or self.external
