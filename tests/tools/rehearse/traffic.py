"""Memory traffic and launches of tiny models, by class of operation and call site.

``python -m tests.tools.rehearse.traffic`` writes ``traffic.json``, with which
``test_traffic.py`` compares.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.result_files import save

FILE = Path(__file__).with_suffix(".json")
EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_moe" / "tiny_gspo.yaml"
FAMILIES = {
    "qwen3_moe": "moe",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
    "qwen3_next": "next",
}
"""Kinds of tiny models, of four layers each."""

Traffic = dict[str, tuple[int, int]]
"""Launches, and bytes outside of products, by class and call site."""


def versions() -> dict[str, str]:
    """Of what decides which operations a layer has."""
    return {name: version(name) for name in ("torch", "megatron-core")}


def traffic_of(family: str) -> Traffic:
    """Of forward and backward passes over two micro-batches on one GPU."""
    from megatron_gspo.config import load_config
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.op_cost import PRODUCT_CLASSES
    from tests.support.tiny_models import tiny_config

    gpu = FakeGpu()
    with fake_cuda(gpu.host), tempfile.TemporaryDirectory() as folder:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

        tiny_config(FAMILIES[family]).save_pretrained(folder)
        overrides = [
            f"model.path={folder}",
            "model.dtype=bfloat16",
            "parallel.tensor_model_parallel_size=1",
            "parallel.expert_model_parallel_size=1",
        ]
        # a scale that an earlier rehearsal left in the class would be copied into
        with mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None):
            record = rehearse_rank(load_config(str(EXAMPLE), overrides), 0, 1, gpu)
    traffic: Traffic = {}
    for op in record.ops:
        if op.phase == "forward_backward":
            direction = "backward" if op.is_backward else "forward"
            place = re.sub(r":\d+ ", " ", op.where) or "autograd"
            site = f"{op.op_class}, {direction}, {place}"
            launches, size = traffic.get(site, (0, 0))
            outside = 0 if op.op_class in PRODUCT_CLASSES else op.count * op.bytes
            traffic[site] = launches + op.count * op.launches, size + outside
    return dict(sorted(traffic.items()))


def growth(held: Traffic, measured: Traffic) -> list[str]:
    """The call sites that have more launches or bytes than before, one line each."""
    lines = []
    for site, (launches, size) in measured.items():
        before = held.get(site, (0, 0))
        if launches > before[0] or size > before[1]:
            lines.append(
                f"{site}: {launches} launches and {size:,} bytes, before {before[0]} and"
                f" {before[1]:,}"
            )
    return lines


def total(traffic: Traffic) -> tuple[int, int]:
    """Launches and bytes of all call sites."""
    return (
        sum(launches for launches, _ in traffic.values()),
        sum(size for _, size in traffic.values()),
    )


def main() -> None:
    from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

    import_torch_with_fake_device()
    held: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    families = {family: traffic_of(family) for family in sys.argv[1:] or FAMILIES}
    held["families"] = held.get("families", {}) | families
    held["versions"] = versions()
    save(FILE, held)


if __name__ == "__main__":
    main()
