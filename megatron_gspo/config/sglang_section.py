"""The section that describes the SGLang servers of `rollout.engine: sglang`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_gspo.config.base import Section


class SGLangConfig(Section):
    urls: list[str] = Field(
        default_factory=list,
        description="Servers (or routers in front of some) that run already, as http://host:port.",
    )
    servers: int = Field(
        0, ge=0, description="Servers that the run starts and watches on the first node, in place of urls."
    )
    python: str | None = Field(
        None, description="Python of the environment that SGLang is installed in; null is the trainer's own."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="First port of the started servers; null takes free ones."
    )
    arguments: list[str] = Field(
        default_factory=list,
        description="Arguments for the started servers, untouched, e.g. [--mem-fraction-static, '0.7']; on the command "
        "line each as --sglang.mem-fraction-static 0.7.",
    )
    start_timeout: float = Field(600.0, gt=0, description="Seconds that a server may take to start.")
    api_key_file: str | None = Field(
        None, description="File whose first line is the servers' API key; null where they want none."
    )
    weight_route: Literal["distributed", "tensor", "disk", "ipc"] = Field(
        "distributed",
        description="How weights reach the servers: broadcast in a process group, HTTP, files that they can read, or "
        "memory of a GPU that they share.",
    )
    bucket_mb: float = Field(512.0, gt=0, description="MiB of weights that are sent at once.")
    weight_dir: str | None = Field(
        None, description="Directory for weight_route: disk, the same on all machines; null is run_dir/weights."
    )
    master_address: str = Field(
        "127.0.0.1",
        description="Address of the first node that the servers reach it by, with weight_route: distributed.",
    )
    max_requests: int = Field(256, ge=1, description="Most requests under way at one server.")
    request_timeout: float = Field(600.0, gt=0, description="Seconds that one request may take.")
    retries: int = Field(
        8, ge=0, description="How often the request of one response is repeated before the run saves and stops."
    )
    response_timeout: float | None = Field(
        None, gt=0,
        description="Seconds that the requests of one response may take together without a token before the run saves "
        "and stops; null is three times request_timeout.",
    )  # fmt: skip
    update_timeout: float = Field(
        600.0, gt=0, description="Seconds that one step of an update of the weights may take."
    )
    recovery_timeout: float = Field(
        600.0, gt=0, description="Seconds that the run waits while no server answers; then it saves and stops."
    )
    health_interval: float = Field(5.0, gt=0, description="Seconds between two looks at a server's health.")
    health_timeout: float = Field(
        10.0, gt=0, description="Seconds that a server may take to say that it is healthy, which takes it one."
    )
    colocated: bool = Field(
        False,
        description="The servers share the trainer's GPUs: they release their memory while it works (start them with "
        "--enable-memory-saver).",
    )
    probe_interval: int = Field(
        0, ge=0, description="Compare both engines' log-probs of some prompts after every so many updates; 0 is never."
    )
    probe_tolerance: float = Field(
        0.5, gt=0, description="Largest difference of a log-prob, in nats, that a probe may find."
    )
    probe_action: Literal["warn", "stop"] = Field("stop", description="What a probe beyond the tolerance does.")

    @property
    def resolved_response_timeout(self) -> float:
        """`response_timeout` in seconds, null resolved."""
        return 3 * self.request_timeout if self.response_timeout is None else self.response_timeout
