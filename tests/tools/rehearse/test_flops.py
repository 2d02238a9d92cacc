"""FLOPs; real tensors stand for the device's."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_gspo.tools.rehearse.flops import FlopLog
from megatron_gspo.tools.rehearse.known_values import KnownValues

aten = torch.ops.aten


def test_products_are_counted_by_phase_as_torch_counts_them() -> None:
    log = FlopLog(KnownValues())
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with FlopCounterMode(display=False) as torchs:
        out = a @ b
    for log.phase in ("build", "optimizer"):
        log.count(aten.mm.default, (a, b), {}, out)
    assert log.counts == {phase: {"aten::mm": torchs.get_total_flops()} for phase in ("build", "optimizer")}


def test_rows_of_a_grouped_product_are_counted_once() -> None:
    log = FlopLog(KnownValues())
    ends = torch.tensor([2, 6], dtype=torch.int32)
    rows, groups, other = torch.ones(6, 4), torch.ones(2, 4, 5), torch.ones(4, 6)
    log.count(aten._grouped_mm.default, (rows, groups, ends), {}, None)
    log.count(aten._grouped_mm.default, (other, torch.ones(6, 5), ends), {}, None)
    log.count(aten._grouped_mm.default, (groups.transpose(1, 2), other, ends), {}, None)
    log.count(aten._grouped_mm.default, (groups.transpose(1, 2), groups), {}, None)
    assert log.counts["build"]["aten::_grouped_mm"] == 3 * 2 * 6 * 4 * 5 + 2 * 2 * 5 * 4 * 5


def test_other_operations_have_none() -> None:
    log = FlopLog(KnownValues())
    log.count(aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}, torch.ones(2))
    assert not log.counts
