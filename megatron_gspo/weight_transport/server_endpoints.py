"""The requests of a weight update, which each kind of inference server defines (`ServerAPI`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gspo.servers.http_client import JsonObject, ServerClient

if TYPE_CHECKING:  # the process that hosts agents calls servers, and has no torch
    from megatron_gspo.weight_transport.buckets import Entry
    from megatron_gspo.weight_transport.update_group import UpdateGroup

RECEIVER = "megatron_gspo_receiver.load"  # our receiver of weights, as SGLang's servers import it
ADAPTERS = "policy"  # the name of the adapters that are trained, on a server


@dataclass(frozen=True)
class ServerInfo:
    """Properties of one server, as it reports them."""

    url: str
    version: str
    """Version of the server's software, for messages only."""

    start_id: str
    """An id that differs after a restart."""

    weight_version: str
    """Version of its weights."""

    model_path: str
    """The directory that it loaded last."""

    device: str
    """The device: "cuda" or "cpu"."""

    tp_size: int
    """Number of tensor-parallel ranks."""

    pp_size: int
    """Number of pipeline-parallel ranks."""

    dp_size: int
    """Number of data-parallel ranks."""

    max_input_tokens: int | None
    """Tokens of the longest prompt; None if not reported."""

    max_total_tokens: int | None
    """Tokens of the longest sequence that it can hold; None if not reported."""

    routed_experts: bool
    """Whether it returns the routed experts."""

    update_session: bool
    """Whether a weight update must be opened and closed by requests of its own (SGLang since
    0.5.23)."""

    speculative: bool = False
    """Whether it decodes speculatively."""

    receiver: bool | None = None
    """Whether it has our receiver of weights; None if it does not say."""

    adapters: bool = False
    """Whether it takes LoRA adapters."""

    adapter_tensors: bool = False
    """Whether it takes LoRA adapters in a request too."""

    keeps_memory: str = ""
    """Why it can't free its GPU memory while it is idle, with the fix; "" if it can or does not
    say."""

    refusal: str = ""
    """Why its responses can't be used, with the fix; "" if they can."""

    def unusable(self, *, routes: bool, colocated: bool = False) -> str:
        """Why a run can't use it, with the fix; "" if it can.

        Args:
            routes: whether the run needs them.
            colocated: whether it must free its memory while the run trains.
        """
        if self.refusal:
            return self.refusal
        if colocated and self.keeps_memory:
            return self.keeps_memory
        if routes and not self.routed_experts:
            return "it returns no routed experts; start it with --enable-return-routed-experts"
        if routes and self.speculative:
            return (
                "it decodes speculatively, which mixes up routed experts; start it without, or use"
                " routing.replay=r2"
            )
        return ""


@dataclass(frozen=True)
class ClearedWeights:
    """The parameters of a server that were set to zero before an update."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of the parameters whose digest the clearing changed; only these can be
    proven."""

    total: int = 0
    """Number of all parameters."""


class WeightEndpoints:
    """One kind of server. Stateless. Every method raises `ServerError`; timeout: seconds of each
    request.

    A kind that lacks a transport does not define its methods, and its config section does not
    accept it.
    """

    engine: str
    """Name of the engine, which is also that of the config section."""

    init_group_path: str = ""
    """Path of `init_group`, for error messages."""

    broadcast_path: str = ""
    """Path of `load_broadcast`, for error messages."""

    async def server_info(self, server: ServerClient, *, timeout: float) -> ServerInfo:
        """What the server reports about itself."""
        raise NotImplementedError

    async def weight_version(self, server: ServerClient, *, timeout: float) -> str | None:
        """The weight version that the server reports; None if it reports none. Also answered
        while paused.
        """
        raise NotImplementedError

    async def pause(self, server: ServerClient, *, timeout: float) -> None:
        """Stop generating; running requests return what they have with finish reason "abort"."""
        raise NotImplementedError

    async def resume(self, server: ServerClient, *, timeout: float) -> None:
        """Generate again."""
        raise NotImplementedError

    async def set_version(self, server: ServerClient, version: str, *, timeout: float) -> None:
        """Set the weight version that the server reports with each response."""
        raise NotImplementedError

    async def flush_cache(self, server: ServerClient, *, timeout: float) -> None:
        """Empty the prefix cache; waits for requests that are still ending."""
        raise NotImplementedError

    async def clear_weights(self, server: ServerClient, *, timeout: float) -> ClearedWeights:
        """Set all parameters of a paused server to zero, for `unwritten`.

        A kind without such a check does nothing.
        """
        return ClearedWeights()

    async def unwritten(
        self, server: ServerClient, cleared: ClearedWeights, *, timeout: float
    ) -> list[str]:
        """Names of parameters that no update has written since `clear_weights`, sorted."""
        return []

    async def begin_update(self, server: ServerClient, *, timeout: float) -> None:
        """Open an update, on a server whose `ServerInfo.update_session` is set.

        One left open is closed first.
        """
        raise NotImplementedError

    async def end_update(self, server: ServerClient, *, timeout: float) -> None:
        """Close an update."""
        raise NotImplementedError

    async def load_checkpoint(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """Load a Hugging Face checkpoint."""
        raise NotImplementedError

    async def load_adapters(self, server: ServerClient, path: Path, *, timeout: float) -> None:
        """Load adapters in PEFT's format as `ADAPTERS`, in place of those of that name."""
        raise NotImplementedError

    async def load_adapter_payloads(
        self,
        server: ServerClient,
        config: Mapping[str, Any],
        payloads: Sequence[Iterable[bytes | memoryview]],
        *,
        timeout: float,
    ) -> None:
        """`load_adapters` of adapters in the request, encoded as for `load_payloads`; config:
        PEFT's.
        """
        raise NotImplementedError

    async def load_payloads(
        self,
        server: ServerClient,
        payloads: Sequence[Iterable[bytes | memoryview]],
        *,
        timeout: float,
    ) -> None:
        """Load a bucket, encoded (`sglang_payload`), one payload for each tensor-parallel rank
        of the server.
        """
        raise NotImplementedError

    async def receive(
        self, server: ServerClient, requests: Sequence[JsonObject], *, timeout: float
    ) -> None:
        """Receive the weights of all sources, on a server with our receiver; a request for each
        tensor-parallel rank (`receiver/megatron_gspo_receiver.py`). Returns when the transfer has
        ended in any way."""
        raise NotImplementedError

    async def init_group(
        self, server: ServerClient, group: UpdateGroup, first_rank: int, *, timeout: float
    ) -> None:
        """Join a process group, with consecutive ranks from `first_rank` on."""
        raise NotImplementedError

    async def load_broadcast(
        self, server: ServerClient, group_name: str, entries: Sequence[Entry], *, timeout: float
    ) -> None:
        """Receive a bucket by broadcast and load it."""
        raise NotImplementedError

    async def destroy_group(self, server: ServerClient, group_name: str, *, timeout: float) -> None:
        """Leave a process group."""
        raise NotImplementedError
