"""Assumptions are changed by name, within their bounds, and each has a reason."""

import dataclasses

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.plan.assumptions import Assumptions, parse_assumptions, reasons


def test_changes_by_name():
    found = parse_assumptions(["matmul_efficiency=0.5", "runtime_gib=4"])
    assert found == dataclasses.replace(Assumptions(), matmul_efficiency=0.5, runtime_gib=4.0)
    assert parse_assumptions([]) == Assumptions()


@pytest.mark.parametrize(
    "change, message",
    [
        ("speed=1", "speed is not an assumption; give one of matmul_efficiency"),
        ("reserve=much", "'much' is not a number"),
        ("reserve=-1", "must be finite and at least 0"),
        ("runtime_gib=inf", "must be finite and at least 0"),
        ("network_efficiency=0", "would make every time infinite"),
        ("network_efficiency=1.5", "is a fraction"),
    ],
)
def test_bad_changes(change, message):
    with pytest.raises(InputError, match=message):
        parse_assumptions([change])


def test_each_has_a_reason():
    assert set(reasons()) == {field.name for field in dataclasses.fields(Assumptions)}
    assert all(reasons().values())
