"""The search ranks what fits and stays within memory."""

from __future__ import annotations

from megatron_gspo.models import read_config
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import find_gpu
from megatron_gspo.tools.plan.layout_search import search
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.model_shapes import SMALL, shape_of


def test_what_fits_is_ranked_and_within_memory() -> None:
    cluster = Cluster(find_gpu("h200"), 8, "none")
    found = search(read_config(SMALL), shape_of(SMALL), Workload(4096), cluster, Assumptions())
    times = [plan.time.total for plan in found.plans]
    assert times == sorted(times) and len(found.plans) > 10
    room = 0.95 * cluster.gpu.memory
    assert all(plan.memory.total <= room for plan in found.plans)
    for plan in found.plans:  # a mode that recomputes less would be taken if it fitted at this budget
        order = ("none", "selective", "full")
        for mode in order[: order.index(plan.recompute)]:
            over = plan.memory.total - plan.memory.activations + plan.activations[mode]
            assert over > room, (name_of(plan.parallel), mode)
    small = Cluster(find_gpu("h100"), 8, "none")
    worse = search(read_config(SMALL), shape_of(SMALL), Workload(4096), small, Assumptions())
    assert len(worse.plans) < len(found.plans)
    filled = search(read_config(SMALL), shape_of(SMALL), Workload(4096), cluster, Assumptions(reserve=0.0))
    assert len(filled.plans) >= len(found.plans) and max(plan.memory.total for plan in filled.plans) > room
