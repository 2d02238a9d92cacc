"""Sections `sglang` and `vllm`, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from megatron_gspo.config.paths import UserPath


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Inference servers: where they are, how they are started, limits, and how weights reach
    them.
    """

    # Name of the section, for messages.
    section: ClassVar[str] = "sglang"
    # False where a layer is loaded from all of its tensors.
    loads_single_tensors: ClassVar[bool] = True
    # Whether the servers compute checksums of what they serve, on every transport.
    has_weight_checker: ClassVar[bool] = False
    # Values of `weight_transport` for servers on the trainer's GPUs, in words.
    colocated_transports: ClassVar[str] = "ipc, or to disk"
    # Values of `weight_transport` for LoRA adapters alone.
    adapter_transports: ClassVar[tuple[str, ...]] = ("disk",)
    urls: tuple[str, ...] = ()
    """URLs of running servers or routers, as http://host:port."""
    num_servers: Annotated[int, Ge(0)] = 0
    """Servers that the run starts on the first node."""
    python: UserPath | None = None
    """Interpreter of the servers' environment; null is the trainer's."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the first started server; null takes free ones."""
    server_args: tuple[str, ...] = ()
    """Arguments of the started servers; on the command line --sglang.tp-size 2."""
    start_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds for a server to start."""
    api_key_file: UserPath | None = None
    """File whose first line is the servers' API key."""
    weight_transport: Literal["distributed", "tensor", "disk", "ipc"] = "distributed"
    """How weights reach the servers; each kind takes some of these."""
    weight_bucket_mb: Annotated[float, Gt(0)] = 512.0
    """MiB of weights that a rank sends at once."""
    weight_changes_only: bool = False
    """Send only tensors that have changed (docs/sglang.md)."""
    weight_checksums: bool = False
    """Compare checksums after an update (docs/sglang.md)."""
    weight_dir: UserPath | None = None
    """Directory of `disk`, the same path on all servers; null is `run_dir`/weights."""
    master_address: str | None = None
    """First node's address for `distributed`; null is that of the route to the servers."""
    max_concurrent_requests: Annotated[int, Ge(1)] = 256
    """Concurrent requests per server."""
    request_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds for one request."""
    retries: Annotated[int, Ge(0)] = 8
    """Retries of a response's request before the run saves and stops."""
    response_timeout: Annotated[float, Gt(0)] | None = None
    """Seconds without a new token before the run stops; null is 3 x `request_timeout`."""
    update_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds for each step of a weight update."""
    recovery_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds without any server before the run saves and stops."""
    health_interval: Annotated[float, Gt(0)] = 5.0
    """Seconds between health checks."""
    health_timeout: Annotated[float, Gt(0)] = 10.0
    """Seconds for a health check."""
    log_prob_check_at_start: bool = True
    """Stop where the servers' first log-probs are another model's (docs/sglang.md)."""
    log_prob_check_interval: Annotated[int, Ge(0)] = 0
    """Updates between further comparisons; 0 is off."""
    log_prob_check_tolerance: Annotated[float, Gt(0)] = 0.5
    """Largest difference of a token's log-probs, in nats."""
    log_prob_check_action: Literal["warn", "stop"] = "stop"
    """Action beyond that tolerance."""
    colocated: bool = False
    """The servers share the trainer's GPUs (docs/sglang.md)."""

    @property
    def is_set(self) -> bool:
        """Whether there are servers, running or to be started."""
        return bool(self.urls or self.num_servers)

    @property
    def uses_receiver(self) -> bool:
        """Whether servers receive weights with our receiver, from all sources at the same time."""
        return bool(self.num_servers) and self.weight_transport == "distributed"

    @property
    def resolved_response_timeout(self) -> float:
        """`response_timeout` in seconds, null resolved."""
        return 3 * self.request_timeout if self.response_timeout is None else self.response_timeout


@dataclass(frozen=True, kw_only=True)
class SGLangConfig(ServerConfig):
    """SGLang servers of `rollout.engine: sglang`."""

    adapter_transports: ClassVar[tuple[str, ...]] = ("disk", "tensor")
    weight_transport: Literal["distributed", "tensor", "disk", "ipc"] = "distributed"
    """How servers get weights (docs/sglang.md)."""


@dataclass(frozen=True, kw_only=True)
class VLLMConfig(ServerConfig):
    """vLLM servers of `rollout.engine: vllm`."""

    section: ClassVar[str] = "vllm"
    loads_single_tensors: ClassVar[bool] = False
    has_weight_checker: ClassVar[bool] = True
    colocated_transports: ClassVar[str] = "disk"
    weight_transport: Literal["distributed", "disk"] = "distributed"
    """How servers get weights (docs/engines.md)."""

    @property
    def uses_receiver(self) -> bool:
        """See `ServerConfig.uses_receiver`: `urls` have it too, or are refused."""
        return self.weight_transport == "distributed"
