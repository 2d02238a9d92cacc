"""The rows of the GPU benchmark, at tiny sizes, as the prediction rehearses them."""

from dataclasses import replace

from .on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_every_row_of_the_benchmark_is_rehearsed() -> None:
    from benchmarks.gpu import TINY
    from benchmarks.gpu_predicted import part_of, rehearsed_rows

    rows = rehearsed_rows(replace(TINY, centred_by=4), has_varlen=True)
    [product] = rows["matrix product"].ops
    assert (product.op_class, product.count, product.flops) == ("product", 1, 2 * 64**3)
    classes = {name: {op.op_class for op in row.ops} for name, row in rows.items()}
    assert "grouped product" in classes["layer"] and "optimizer" not in classes["layer"]
    assert {"grouped product", "attention", "optimizer"} <= classes["training step"]
    assert not {"attention", "optimizer"} & classes["head"]
    products = [sum(op.flops for op in rows[name].ops) for name in ("head", "centred head")]
    assert products[0] == products[1] > 0
    assert len({part_of(op) for op in rows["training step"].ops}) == 6


@on_fake_gpu
def test_experts_of_a_layer_are_shared() -> None:
    from benchmarks.gpu import TINY
    from benchmarks.gpu_predicted import rehearsed_rows

    rows = rehearsed_rows(replace(TINY, expert_parallel=2), has_varlen=True)
    exchanged = [call for call in rows["layer"].collectives if call.op == "alltoall_base"]
    assert len(exchanged) == 6  # rows there and back, probabilities there; twice for the gradients
    assert "training step" not in rows
