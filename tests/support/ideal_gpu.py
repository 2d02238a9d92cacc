"""A GPU and assumptions with round numbers, for times computed by hand."""

from __future__ import annotations

import dataclasses

from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import Gpu

# Round rates, everything reached: 100 TFLOP/s, HBM 1 TB/s, NVLink 100 GB/s, network 10 GB/s
GPU = Gpu("round", 100 * 2**30, 1e14, 1e12, 1e11, 1e10)
IDEAL = dataclasses.replace(
    Assumptions(), matmul_efficiency=1, attention_efficiency=1, expert_efficiency=1, expert_half_rows=0,
    tensor_efficiency=1, elementwise_share=0, packing_imbalance=1, expert_imbalance=1, nvlink_efficiency=1,
    network_efficiency=1, all_to_all_efficiency=1, context_exposed=1, mean_response=1, engine_bandwidth=1,
    engine_flops=1, decode_step_ms=0, other_seconds=0, engine_memory=1, receive_us_token=0, receive_ns_id=0,
    prepare_us_token=0, prepare_ns_id=0,
)  # fmt: skip
