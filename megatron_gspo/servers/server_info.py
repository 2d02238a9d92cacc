"""What a server reports about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerInfo:
    """Properties of one server, as it reports them.

    version: of the server's software, for messages only. start_id: differs after a restart. weight_version: of its
    weights. model_path: the directory that it loaded last. device: "cuda" or "cpu". tp_size, pp_size, dp_size:
    parallel ranks. max_input_tokens: longest prompt; max_total_tokens: capacity of its KV cache in tokens; None if not
    reported. routed_experts: whether it returns them. update_session: whether a weight update must be opened and closed
    by requests of its own (SGLang 0.5.23 requires them, 0.5.15 does not have them).
    """

    url: str
    version: str
    start_id: str
    weight_version: str
    model_path: str
    device: str
    tp_size: int
    pp_size: int
    dp_size: int
    max_input_tokens: int | None
    max_total_tokens: int | None
    routed_experts: bool
    update_session: bool
