"""Everything that the estimate takes for granted, in one place: printed with every plan, overridden by ``--assume``.

None of these was measured by this project on a GPU. Each has its reason; change it where you have measured yours.
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
    """Fractions of the vendor's figures that are reached, and sizes that no formula gives."""

    matmul_efficiency: float = _a(0.65, "large bfloat16 products on Hopper reach 0.6 to 0.8 of the data sheet")
    attention_efficiency: float = _a(0.40, "flash attention, forward and backward together, causal, packed sequences")
    expert_efficiency: float = _a(0.50, "grouped expert products with thousands of rows each")
    expert_half_rows: float = _a(256, "rows an expert gets at which its products run at half of that")
    tensor_efficiency: float = _a(0.95, "of the products' speed that each doubling of TP leaves: narrower products")
    elementwise_share: float = _a(0.20, "time of norms, rotary angles, permutation, gates beside the products")
    packing_imbalance: float = _a(1.05, "the slowest data-parallel rank's tokens over the mean")
    expert_imbalance: float = _a(1.10, "the busiest rank's expert rows over the mean, in time and in memory")
    nvlink_efficiency: float = _a(0.75, "of NVLink's one-direction bandwidth in collectives")
    network_efficiency: float = _a(0.80, "of the network adapter's bandwidth in collectives")
    all_to_all_efficiency: float = _a(0.60, "of that again in all-to-all, which sends many small pieces")
    context_exposed: float = _a(0.30, "part of context parallelism's exchange that attention doesn't hide")
    gradient_overlap: float = _a(0.0, "part of gradient reduction and weight gathering hidden; 0 without overlap_*")
    runtime_gib: float = _a(3.0, "CUDA context, NCCL buffers, cuBLAS workspaces on a GPU")
    fragmentation: float = _a(0.05, "memory that the allocator can't use, of all activations")
    reserve: float = _a(0.05, "of a GPU that a layout must leave free: the plan's own error, moments of uneven load")
    mean_response: float = _a(0.5, "mean response length over the longest; memory always counts the longest")
    engine_memory: float = _a(0.90, "part of a GPU that an engine with GPUs of its own uses")
    engine_residual_gib: float = _a(2.0, "what a colocated engine keeps while it is asleep: context, graphs")
    engine_bandwidth: float = _a(0.60, "of HBM bandwidth that decoding reaches")
    engine_flops: float = _a(0.40, "of the data sheet that prefill and large decode batches reach")
    decode_step_ms: float = _a(4.0, "least time of a decoding step: scheduler, launches, all-reduces")
    engine_sequences: float = _a(256, "most sequences that an engine decodes at once (sglang max_requests)")
    file_system_gbs: float = _a(20.0, "GB/s that all engines together read from the shared file system")
    other_seconds: float = _a(5.0, "rewards, packing, logging, Python: the same at every size")


def parse_assumptions(changes: Sequence[str]) -> Assumptions:
    """The defaults with ``name=value`` changes; ``InputError`` for an unknown name or a value that is no number."""
    defaults = {f.name: f.default for f in dataclasses.fields(Assumptions)}
    names = list(defaults)
    found: dict[str, float] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in names:
            raise InputError(f"--assume {change}: {name} is no assumption; give one of {', '.join(names)}")
        try:
            found[name] = float(text)
        except ValueError:
            raise InputError(f"--assume {change}: {text!r} is no number; write {name}=0.5") from None
        if not 0 <= found[name] < float("inf"):
            raise InputError(f"--assume {change}: must be 0 or more and finite; write {name}=0.5")
        if name.endswith(("efficiency", "bandwidth", "flops", "gbs")) and found[name] == 0:
            raise InputError(f"--assume {change}: would make every time infinite; give a number above 0")
        if isinstance(most := defaults[name], float) and most < 1 < found[name]:
            raise InputError(f"--assume {change}: is a part of a whole; give at most 1, as {name}={most:g}")
    return dataclasses.replace(Assumptions(), **found)


def reasons() -> dict[str, str]:
    """Why each has its default."""
    return {f.name: f.metadata["why"] for f in dataclasses.fields(Assumptions)}
