"""Section `sglang`, and what it shares with any engine that runs in server processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Inference servers: where they are, how they are started, limits, and how weights reach them."""

    section: ClassVar[str] = "sglang"  # of the config, for messages
    urls: tuple[str, ...] = ()
    """URLs of running servers (or of routers), as http://host:port."""
    num_servers: Annotated[int, Ge(0)] = 0
    """Servers that the run starts and supervises on the first node, in place of `urls`."""
    python: str | None = None
    """Python interpreter of the environment with the server's package; null is the trainer's."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the first started server; the others take the following ports. Null takes free ports."""
    server_args: tuple[str, ...] = ()
    """Arguments passed unchanged to the started servers, e.g. [--mem-fraction-static, '0.7']; on the command line each
    as --sglang.mem-fraction-static 0.7."""
    start_timeout: Annotated[float, Gt(0)] = 600.0
    """Timeout of a server's start in seconds."""
    api_key_file: str | None = None
    """File with the servers' API key on its first line; null if they need none."""
    weight_transport: Literal["distributed", "tensor", "disk", "ipc"] = "distributed"
    """How weights reach the servers: broadcast in a process group (`distributed`), HTTP (`tensor`), files (`disk`), or
    shared GPU memory (`ipc`)."""
    weight_bucket_mb: Annotated[float, Gt(0)] = 512.0
    """Weights sent at once, in MiB."""
    weight_dir: str | None = None
    """Directory for `weight_transport: disk`, which all servers must reach under the same path; null is
    `run_dir`/weights."""
    master_address: str = "127.0.0.1"
    """Address of the first node as the servers reach it, with `weight_transport: distributed`."""
    max_concurrent_requests: Annotated[int, Ge(1)] = 256
    """Maximum number of concurrent requests per server."""
    request_timeout: Annotated[float, Gt(0)] = 600.0
    """Timeout of one request in seconds."""
    retries: Annotated[int, Ge(0)] = 8
    """Retries of the request of one response before the run saves and stops."""
    response_timeout: Annotated[float, Gt(0)] | None = None
    """Seconds that the requests of one response may take together without a new token before the run saves and stops;
    null is three times `request_timeout`."""
    update_timeout: Annotated[float, Gt(0)] = 600.0
    """Timeout of each step of a weight update in seconds."""
    recovery_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds to wait for a server while none responds; then the run saves and stops."""
    health_interval: Annotated[float, Gt(0)] = 5.0
    """Seconds between health checks of a server."""
    health_timeout: Annotated[float, Gt(0)] = 10.0
    """Timeout of a health check in seconds. A check generates one token and takes about a second."""
    log_prob_check_interval: Annotated[int, Ge(0)] = 0
    """Updates between comparisons of the engines' log-probs on some prompts; 0 never compares."""
    log_prob_check_tolerance: Annotated[float, Gt(0)] = 0.5
    """Maximum difference of a log-prob in such a check, in nats."""
    log_prob_check_action: Literal["warn", "stop"] = "stop"
    """Action when a check exceeds the tolerance."""
    colocated: bool = False
    """The servers share the trainer's GPUs and release their memory while it trains. Start them with
    --enable-memory-saver."""

    @property
    def resolved_response_timeout(self) -> float:
        """`response_timeout` in seconds, null resolved."""
        return 3 * self.request_timeout if self.response_timeout is None else self.response_timeout


@dataclass(frozen=True, kw_only=True)
class SGLangConfig(ServerConfig):
    """SGLang servers of `rollout.engine: sglang`."""
