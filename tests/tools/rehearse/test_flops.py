"""FLOPs; real tensors stand for the device's."""

import pytest
import torch

from megatron_gspo.tools.rehearse.flops import FlopLog
from megatron_gspo.tools.rehearse.known_values import KnownValues
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError

aten = torch.ops.aten


def test_products_in_place_and_of_vectors_are_counted() -> None:
    log = FlopLog(KnownValues())
    total = torch.zeros(3, 5)
    a = torch.ones(3, 4)
    b = torch.ones(4, 5)
    vector = torch.ones(4)
    log.count(aten.addmm_.default, (total, a, b), {"beta": 0}, total)
    log.count(aten.baddbmm_.default, (total[None], a[None], b[None]), {"alpha": -1}, total[None])
    log.count(aten.mv.default, (a, vector), {}, torch.ones(3))
    log.count(aten.addmv_.default, (torch.ones(3), a, vector), {}, torch.ones(3))
    log.count(aten.dot.default, (vector, vector), {}, torch.ones(()))
    assert log.counts["build"] == {
        "aten::addmm_": 2 * 3 * 4 * 5,
        "aten::baddbmm_": 2 * 3 * 4 * 5,
        "aten::mv": 2 * 3 * 4,
        "aten::addmv_": 2 * 3 * 4,
        "aten::dot": 2 * 4,
    }


def test_a_triangular_system_takes_half_of_a_product() -> None:
    log = FlopLog(KnownValues())
    system = torch.eye(4).expand(7, 4, 4)
    right = torch.ones(7, 4, 3)
    log.count(aten.linalg_solve_triangular.default, (system, right), {"upper": False}, right)
    assert log.counts["build"] == {"aten::linalg_solve_triangular": 7 * (2 * 4 * 4 * 3) // 2}


@pytest.mark.parametrize(
    "func",
    [
        aten.addbmm.default,
        aten.addbmm_.default,
        aten.linear.default,
        aten.linalg_lu.default,
        aten._native_multi_head_attention.default,
        aten._conv_depthwise2d.default,
        aten.linalg_cholesky_ex.default,
        aten._int_mm.default,
        aten._scaled_grouped_mm.default,
    ],
    ids=str,
)
def test_a_product_without_a_formula_is_an_error_that_names_it(func) -> None:
    with pytest.raises(RehearsalError, match=func._overloadpacket._qualified_op_name):
        FlopLog(KnownValues()).count(func, (), {}, None)
