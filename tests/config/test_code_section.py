"""Defaults of `data.code`."""

from __future__ import annotations

import pytest

from megatron_gspo.config.code_section import CodeConfig


def test_untrusted_code_needs_isolation_unless_it_is_waived() -> None:
    assert CodeConfig().require_isolation and CodeConfig().sandbox_url is None


@pytest.mark.parametrize(("cpu", "wall"), [(2.0, 7.0), (6.0, 19.0)])
def test_wall_clock_time_is_three_times_as_long_and_a_second(cpu: float, wall: float) -> None:
    assert CodeConfig(time_limit=cpu).wall_limit == wall
