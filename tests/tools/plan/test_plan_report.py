"""Tables of the plan as Markdown."""

from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import find_gpu
from megatron_gspo.tools.plan.plan_report import assumptions_table, describe, table
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.model_shapes import dense_shape


def test_columns_have_one_width():
    lines = table([["a", "long"], ["wide", "b"]]).splitlines()
    assert lines == ["| a    | long |", "|------|------|", "| wide | b    |"]


def test_every_assumption_has_a_row():
    lines = assumptions_table(Assumptions()).splitlines()
    assert len([line for line in lines if "matmul_efficiency" in line and "0.65" in line]) == 1
    assert len(lines) >= 2 + len(Assumptions.__dataclass_fields__)


def test_the_head_names_workload_and_machine():
    work = Workload(response_length=100, prompt_length=20, rollout_batch_size=4, n_samples=2, global_batch_size=4)
    text = describe(dense_shape(), work, Cluster(find_gpu("h200"), 16, "none"))
    assert "4 prompts x 2 responses of up to 20 + 100 tokens, mini-batches of 4" in text
    assert "16 x h200 (140.4 GiB), generation not counted" in text
