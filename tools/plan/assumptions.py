"""The assumptions of the estimate, printed with every plan and overridden by ``--assume``.

None of these was measured by this project on a GPU; what hosts do with samples was, on a CPU. Replace them by your own
measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_gspo.errors import InputError


def _a(default: float, why: str) -> float:
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True)
class Assumptions:
    """Reached fractions of the vendor's figures, and constants that are not computed."""

    matmul_efficiency: float = _a(0.65, "large bfloat16 products on Hopper reach 0.6 to 0.8 of the data sheet")
    attention_efficiency: float = _a(0.40, "flash attention, forward and backward together, causal, packed sequences")
    expert_efficiency: float = _a(0.50, "grouped expert products with thousands of rows each")
    expert_half_rows: float = _a(256, "rows per expert at which its products reach half of expert_efficiency")
    tensor_efficiency: float = _a(0.95, "factor on the products' speed for each doubling of TP: narrower products")
    elementwise_share: float = _a(0.20, "time of norms, rotary embedding, permutation, gates relative to the products")
    packing_imbalance: float = _a(1.05, "the slowest data-parallel rank's tokens over the mean")
    expert_imbalance: float = _a(1.10, "the busiest rank's expert rows over the mean, in time and in memory")
    nvlink_efficiency: float = _a(0.75, "of NVLink's one-direction bandwidth in collectives")
    network_efficiency: float = _a(0.80, "of the network adapter's bandwidth in collectives")
    all_to_all_efficiency: float = _a(0.60, "further factor of all-to-all, which sends many small messages")
    context_exposed: float = _a(0.30, "part of the context-parallel exchange that attention does not hide")
    gradient_overlap: float = _a(0.0, "part of gradient reduction and weight gathering hidden; 0 without overlap_*")
    runtime_gib: float = _a(3.0, "CUDA context, NCCL buffers, cuBLAS workspaces on a GPU")
    fragmentation: float = _a(0.05, "memory lost in the allocator, relative to the activations")
    reserve: float = _a(0.05, "part of a GPU that a layout must leave free: error of the estimate, uneven load")
    mean_response: float = _a(0.5, "mean response length over the longest; memory uses the longest")
    engine_memory: float = _a(0.90, "part of a GPU that an engine on separate GPUs uses")
    engine_residual_gib: float = _a(2.0, "memory that a paused colocated engine keeps: context, graphs")
    engine_bandwidth: float = _a(0.60, "of HBM bandwidth that decoding reaches")
    engine_flops: float = _a(0.40, "of the data sheet that prefill and large decode batches reach")
    decode_step_ms: float = _a(4.0, "minimum time of a decoding step: scheduler, launches, all-reduces")
    engine_sequences: float = _a(256, "maximum concurrent sequences of an engine (sglang max_requests)")
    file_system_gbs: float = _a(20.0, "GB/s that all engines together read from the shared file system")
    receive_us_token: float = _a(0.30, "microseconds of a core to receive and check a token: benchmarks/real_size.py")
    receive_ns_id: float = _a(5.7, "nanoseconds of a core for each expert id of it, in base64")
    prepare_us_token: float = _a(0.21, "microseconds of a core to plan, move, pack, collect and measure a token")
    prepare_ns_id: float = _a(0.19, "nanoseconds of a core for each expert id of it")
    other_seconds: float = _a(5.0, "rewards, logging, Python: the same at every size")


def parse_assumptions(changes: Sequence[str]) -> Assumptions:
    """The defaults with ``name=value`` changes; ``InputError`` for an unknown name or an invalid value."""
    defaults = {f.name: f.default for f in dataclasses.fields(Assumptions)}
    names = list(defaults)
    found: dict[str, float] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in names:
            raise InputError(f"--assume {change}: {name} is not an assumption; give one of {', '.join(names)}")
        try:
            found[name] = float(text)
        except ValueError:
            raise InputError(f"--assume {change}: {text!r} is not a number; write {name}=0.5") from None
        if not 0 <= found[name] < float("inf"):
            raise InputError(f"--assume {change}: must be finite and at least 0; write {name}=0.5")
        if name.endswith(("efficiency", "bandwidth", "flops", "gbs")) and found[name] == 0:
            raise InputError(f"--assume {change}: would make every time infinite; give a number above 0")
        if isinstance(most := defaults[name], float) and most < 1 < found[name]:
            raise InputError(f"--assume {change}: is a fraction; give at most 1, as {name}={most:g}")
    return dataclasses.replace(Assumptions(), **found)


def reasons() -> dict[str, str]:
    """The reason of each default."""
    return {f.name: f.metadata["why"] for f in dataclasses.fields(Assumptions)}
