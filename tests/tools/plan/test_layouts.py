"""Layouts against a naive enumeration, and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.models import read_config
from megatron_gspo.tools.plan.layouts import feasible, name_of, parse_layout
from tests.support.model_shapes import LARGE, SMALL


def naive_layouts(hf: dict[str, Any], gpus: int, batch: int) -> set[tuple[int, ...]]:
    """Every combination of sizes, by the rules as docs/scaling.md states them."""
    layouts = set()
    sizes = range(1, gpus + 1)
    for tp in sizes:
        for pp in sizes:
            for cp in sizes:
                if gpus % (tp * pp * cp) or gpus // (tp * pp * cp) > batch:
                    continue
                if hf["num_attention_heads"] % tp or hf["num_key_value_heads"] % tp:
                    continue
                extra = 2 if hf["num_hidden_layers"] % pp else 0
                if (hf["num_hidden_layers"] + extra) % pp:
                    continue
                for ep in sizes:
                    for etp in {1, tp}:
                        if (
                            gpus % (etp * ep * pp)
                            or hf["num_experts"] % ep
                            or hf["moe_intermediate_size"] % etp
                        ):
                            continue
                        layers = (hf["num_hidden_layers"] + extra) // pp
                        for vp in [1, *(v for v in (2, 3, 4) if pp > 1 and layers % v == 0)]:
                            layouts.add((tp, pp, extra, vp, cp, ep, etp))
    return layouts


@pytest.mark.parametrize("model, gpus, batch", [(SMALL, 8, 256), (SMALL, 16, 4), (LARGE, 16, 256)])
def test_layouts_are_all_that_the_rules_allow(model: Path, gpus: int, batch: int) -> None:
    hf = read_config(model)
    layouts = feasible(hf, gpus, 8, batch)
    ours = [
        (
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.extra_pipeline_layers,
            p.virtual_pipeline_model_parallel_size or 1,
            p.context_parallel_size,
            p.expert_model_parallel_size,
            p.expert_tensor_size,
        )
        for p in layouts
    ]
    assert len(ours) == len(set(ours)) and set(ours) == naive_layouts(hf, gpus, batch)


def test_a_named_layout() -> None:
    hf = read_config(SMALL)
    parallel = parse_layout("tp2 PP4,VP3 EP8", hf, 64)
    assert name_of(parallel) == "TP2 PP4 VP3 EP8"
    assert name_of(parse_layout("PP8+2 VP2", read_config(LARGE), 8)) == "PP8+2 VP2"
    with pytest.raises(InputError, match=r"EP8\+2 is not a size"):
        parse_layout("EP8+2", hf, 8)
