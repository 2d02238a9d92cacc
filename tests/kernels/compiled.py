"""Compile every kernel for Hopper and Blackwell, without a GPU, and print what it takes as JSON.

Not in the tests' process, where Triton interprets.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_gspo.kernels import (
    adam,
    embedding_gradient,
    expert_gradients,
    gated_unit,
    logit_comparison,
    logit_gradient,
    logit_statistics,
    rotated_heads,
    row_copies,
)

CAPABILITIES = (90, 100)
_WARPS = 4
_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Build:
    """A kernel with the types of its arguments and the sizes of Qwen3-30B-A3B."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    """In the order of the kernel's arguments, as the types."""
    aligned: tuple[str, ...] = ()
    """Of the arguments, integers that 16 divides."""
    warps: int = _WARPS
    stores: int = 16
    """Bytes that a thread stores at once."""


_UNIT = {"count": "i32", "limit": "fp32", "alpha": "fp32", "offset": "fp32"}
_UNIT_CONSTANTS = {"WIDTH": 768, "ROWS": gated_unit.ROWS, "COLUMNS": gated_unit.COLUMNS}
_HEADS = {
    "mixed_pointer": "*bf16",
    "query_weight_pointer": "*bf16",
    "key_weight_pointer": "*bf16",
    "cos_pointer": "*bf16",
    "sin_pointer": "*bf16",
}
_HEADS_CONSTANTS = {
    "GROUPS": 4,
    "QUERIES": 8,
    "SIZE": 128,
    "ROTATED": 128,
    "HALF": 64,
    "REST": 0,
    "WITH_NORMS": 1,
    "ROWS": rotated_heads.ROWS,
}
_ADAM = {
    "table_pointer": "*i64",
    "tensor_pointer": "*i32",
    "count": "i32",
    **dict.fromkeys(
        (
            "clip",
            "kept",
            "gradient_share",
            "beta2",
            "square_share",
            "correction",
            "eps",
            "step_size",
        ),
        "fp32",
    ),
}
BUILDS = {
    "adam_step": Build(
        adam.adam_kernel,
        _ADAM,
        {
            "WITH_WEIGHTS": 1,
            "WIDTH": adam.WIDE,
            "ALIGNMENT": adam.BYTES,
            "COLUMNS": adam.COLUMNS,
        },
    ),
    "rotated_heads": Build(
        rotated_heads.rotated_heads_kernel,
        {
            **_HEADS,
            "query_pointer": "*bf16",
            "key_pointer": "*bf16",
            "value_pointer": "*bf16",
            "count": "i32",
            "eps": "fp32",
        },
        _HEADS_CONSTANTS,
    ),
    "rotated_heads_backward": Build(
        rotated_heads.rotated_heads_backward_kernel,
        {
            "grad_query_pointer": "*bf16",
            "grad_key_pointer": "*bf16",
            "grad_value_pointer": "*bf16",
            **_HEADS,
            "grad_mixed_pointer": "*bf16",
            "sums_pointer": "*fp32",
            "count": "i32",
            "eps": "fp32",
        },
        _HEADS_CONSTANTS,
    ),
    "add_expert_gradients": Build(
        expert_gradients.add_expert_gradients_kernel,
        {
            "totals_pointer": "*fp32",
            "gradients_pointer": "*bf16",
            "ends_pointer": "*i32",
            "size": "i32",
            "step": "i32",
        },
        {"COLUMNS": expert_gradients.COLUMNS},
        aligned=("size", "step"),
    ),
    "add_embedding_gradient": Build(
        embedding_gradient.add_embedding_gradient_kernel,
        {
            "total_pointer": "*fp32",
            "rows_pointer": "*bf16",
            "sorted_ids_pointer": "*i32",
            "order_pointer": "*i64",
            "ends_pointer": "*i64",
            "count": "i32",
            "width": "i32",
        },
        {"ROWS": embedding_gradient.ROWS, "COLUMNS": embedding_gradient.COLUMNS},
        aligned=("width",),
    ),
    "scaled_product": Build(
        gated_unit.scaled_product_kernel,
        {"hidden_pointer": "*bf16", "probs_pointer": "*fp32", "out_pointer": "*bf16", **_UNIT},
        _UNIT_CONSTANTS,
    ),
    "scaled_product_backward": Build(
        gated_unit.scaled_product_backward_kernel,
        {
            "grad_pointer": "*bf16",
            "hidden_pointer": "*bf16",
            "probs_pointer": "*fp32",
            "out_pointer": "*bf16",
            "grad_hidden_pointer": "*bf16",
            "grad_probs_pointer": "*fp32",
            **_UNIT,
        },
        _UNIT_CONSTANTS,
    ),
    "logit_statistics": Build(
        logit_statistics.logit_statistics_kernel,
        {
            "logits_pointer": "*fp32",
            "statistics_pointer": "*fp32",
            "width": "i32",
            "logits_stride": "i32",
            "statistics_stride": "i32",
        },
        {"WITH_MOMENT": 1, "COLUMNS": logit_statistics.COLUMNS},
        aligned=("width", "logits_stride"),
        warps=logit_statistics.WARPS,
        stores=4,  # one number a row
    ),
    "logit_gradient": Build(
        logit_gradient.logit_gradient_kernel,
        {
            "logits_pointer": "*fp32",
            "label_pointer": "*i64",
            "factors_pointer": "*fp32",
            "out_pointer": "*bf16",
            "first": "i32",
            "width": "i32",
            "factors_stride": "i32",
            "label_count": "i32",
        },
        {"COLUMNS": logit_gradient.COLUMNS},
        aligned=("width",),
    ),
    "logit_comparison": Build(
        logit_comparison.logit_comparison_kernel,
        {
            "logits_pointer": "*fp32",
            "teacher_pointer": "*fp32",
            "statistics_pointer": "*fp32",
            "width": "i32",
            "logits_stride": "i32",
            "teacher_stride": "i32",
            "statistics_stride": "i32",
        },
        {"COLUMNS": logit_comparison.COLUMNS},
        aligned=("width", "logits_stride", "teacher_stride"),
        warps=logit_comparison.WARPS,
        stores=4,  # one number a row
    ),
    "comparison_gradient": Build(
        logit_comparison.comparison_gradient_kernel,
        {
            "logits_pointer": "*fp32",
            "teacher_pointer": "*fp32",
            "label_pointer": "*i64",
            "factors_pointer": "*fp32",
            "out_pointer": "*bf16",
            "first": "i32",
            "width": "i32",
            "factors_stride": "i32",
            "label_count": "i32",
        },
        {"COLUMNS": logit_comparison.COLUMNS},
        aligned=("width",),
    ),
    "copy_rows": Build(
        row_copies.copy_rows_kernel,
        {"x_pointer": "*bf16", "source_pointer": "*i64", "out_pointer": "*bf16", "count": "i32"},
        {"WIDTH": 2048, "ROWS": row_copies.ROWS, "COLUMNS": row_copies.COLUMNS},
    ),
    "sum_rows": Build(
        row_copies.sum_rows_kernel,
        {
            "x_pointer": "*bf16",
            "slot_pointer": "*i64",
            "first_pointer": "*i64",
            "out_pointer": "*bf16",
            "count": "i32",
            "slots": "i32",
        },
        {"WIDTH": 2048, "MOST": 8, "ROWS": row_copies.SUMS, "COLUMNS": row_copies.COLUMNS},
    ),
}


def compiled(build: Build, capability: int) -> dict[str, Any]:
    """Registers and bytes of stack of a thread, and the bytes that a load and a store move at most."""
    names = [*build.types, *build.constants]
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in build.types.items()
        if kind.startswith("*") or name in build.aligned
    }
    source = ASTSource(
        fn=build.kernel,
        signature=build.types | dict.fromkeys(build.constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    result = triton.compile(source, target=target, options={"num_warps": build.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        command = [str(_TOOL), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [[registers, stack]] = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return {
        "registers": int(registers),
        "stack": int(stack),
        "load": max(widths(result.asm["ptx"], "ld")),
        "store": max(widths(result.asm["ptx"], "st")),
        "wanted_store": build.stores,
        "atomics": len(re.findall(r"\b(?:atom|red)\.global", result.asm["ptx"])),
    }


def widths(ptx: str, instruction: str) -> Iterator[int]:
    """The bytes that each access of global memory moves for a thread."""
    pattern = rf"\b{instruction}\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\s"
    for count, bits in re.findall(pattern, ptx):
        yield int(count or 1) * int(bits) // 8


if __name__ == "__main__":
    results = {
        f"{name} sm_{capability}": compiled(build, capability)
        for name, build in BUILDS.items()
        for capability in CAPABILITIES
    }
    print(json.dumps(results, indent=1))
