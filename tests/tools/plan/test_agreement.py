"""The plan's states, activations and collectives are those of rehearsals; ``agreement`` compares many more layouts."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from megatron_gspo.tools.rehearse.records import Collective
from tests.tools.plan import agreement
from tests.tools.plan.agreement import (
    LAYOUTS,
    Comparison,
    Layout,
    compare,
    comparison_table,
    records,
    rehearsed_traffic,
    share_left_out,
)
from tests.tools.rehearse import synthetic_records

MIB = 2**20

SHARED = "30b tp=2 cp=2 ep=4 etp=2 lora=8 adapters=shared"
SAME = Comparison(
    "a rank", dict(weights=1, gradients=2, optimizer=3, activations=104),
    dict(weights=1, gradients=2, optimizer=3, activations=100), dict(tp=5), dict(tp=5),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["30b_4x8_gspo", "30b tp=1 cp=2 ep=8", "30b tp=1 pp=2 vp=2 ep=4", "235b_24x8_gspo",
                                  SHARED, "80b pp=1 ep=8"])  # fmt: skip
def test_a_plan_agrees_with_its_rehearsal(name: str) -> None:
    layout = next(one for one in LAYOUTS if one.name == name)
    for record in records(layout):
        found = compare(layout, record)
        assert found.states_agree, found
        assert abs(found.activations_off) < 0.05, found
        assert not found.unequal_traffic, found
        # another plan's figures would be seen
        other = dataclasses.replace(layout, changes=(*layout.changes, ("recompute", "none")))
        assert abs(compare(other, record).activations_off) > 0.05
        assert compare(other, record).unequal_traffic


def test_disagreement_is_shown() -> None:
    assert SAME.states_agree and not SAME.unequal_traffic and SAME.activations_off == pytest.approx(0.04)
    other = dataclasses.replace(SAME, planned=SAME.planned | dict(optimizer=7), planned_traffic={}, name="another")
    assert not other.states_agree and other.unequal_traffic == ["tp 0/5"]
    lines = comparison_table([SAME, other]).splitlines()
    assert "| equal: tp" in lines[-2] and "+4 " in lines[-1] and "tp 0/5" in lines[-1]


@pytest.mark.parametrize("changed, agrees", [
    ({}, True),
    (dict(planned_traffic=dict(tp=4)), False),
    (dict(planned=SAME.planned | dict(weights=0)), False),
    (dict(planned=SAME.planned | dict(activations=106)), False),
])  # fmt: skip
def test_a_disagreement_is_a_failure_and_is_written(changed, agrees, tmp_path, monkeypatch, capsys):
    found = dataclasses.replace(SAME, left_out=0.01, **changed)
    monkeypatch.setattr(agreement, "records", lambda layout, folder: [None])
    monkeypatch.setattr(agreement, "compare", lambda layout, record: found)
    monkeypatch.setattr(sys, "argv", ["agreement", "30b_4x8_gspo", "--json", str(tmp_path / "found.json")])
    assert agreement.main() == (not agrees)
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["agrees"] is agrees and row["planned_traffic"] == found.planned_traffic
    assert capsys.readouterr().out.rstrip(" |\n").endswith("1.00 %")


def test_a_run_that_stops_has_written_the_layouts_before(tmp_path, monkeypatch):
    def rehearsed(layout, folder):
        if layout is LAYOUTS[1]:
            raise RuntimeError("stopped")
        return [None]

    monkeypatch.setattr(agreement, "records", rehearsed)
    monkeypatch.setattr(agreement, "compare", lambda layout, record: dataclasses.replace(SAME, name=layout.name))
    monkeypatch.setattr(sys, "argv", ["agreement", "--json", str(tmp_path / "found.json")])
    with pytest.raises(RuntimeError, match="stopped"):
        agreement.main()
    assert [row["name"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]] == [LAYOUTS[0].name]


def test_what_is_left_out_has_its_share():
    def one(op: str, group: str, size: int, phase: str = "forward_backward") -> Collective:
        return Collective(op, group, (0, 1), "bfloat16", size, (), phase)

    gather = "allgather_base"
    calls = (one(gather, "tp", 3 * MIB), one(gather, "tp", MIB // 2), one("allreduce", "tp", MIB // 2),
             one(gather, "dp_cp", MIB // 4), one("alltoall_base", "ep", MIB, "weight_export"))  # fmt: skip
    found = dataclasses.replace(synthetic_records.record(), collectives=calls)
    assert share_left_out(found) == pytest.approx(1 / 4.25)
    assert rehearsed_traffic(found) == {"tensor": 3 * MIB, "weights": MIB // 4}


def test_layouts_use_every_dimension() -> None:
    assert len(LAYOUTS) >= 12 and len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    parallel = [layout.config.parallel for layout in LAYOUTS]
    for key in ("tensor_model", "pipeline_model", "context", "expert_model"):
        assert any(getattr(one, f"{key}_parallel_size") > 1 for one in parallel), key
    assert any(one.virtual_pipeline_model_parallel_size for one in parallel)
    assert {layout.shape.num_experts for layout in LAYOUTS} == {32, 64, 128, 256, 512}
    assert {layout.shape.hidden_size for layout in LAYOUTS} == {2048, 2880, 3072, 4096}
    mixers = {mixer for layout in LAYOUTS for mixer in layout.shape.mixers}
    assert mixers == {"attention", "gated_delta_net", "joint_norm_attention", "latent_attention", "sink_attention"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layouts_are_valid(layout: Layout) -> None:
    layout.config.check_sizes(layout.world)
