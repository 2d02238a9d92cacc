"""Tables of the plan as Markdown."""

from megatron_gspo.tools.plan.plan_report import table


def test_columns_have_one_width() -> None:
    lines = table([["a", "long"], ["wide", "b"]]).splitlines()
    assert lines == ["| a    | long |", "|------|------|", "| wide | b    |"]
