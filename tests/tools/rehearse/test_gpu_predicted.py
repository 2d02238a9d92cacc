"""The rows of the GPU benchmark, at tiny sizes, as the prediction rehearses them."""

from .on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_every_row_of_the_benchmark_is_rehearsed() -> None:
    from benchmarks.gpu import TINY
    from benchmarks.gpu_predicted import rehearsed_ops

    ops = rehearsed_ops(TINY, has_varlen=True)
    [product] = ops["matrix product"]
    assert (product.op_class, product.count, product.flops) == ("product", 1, 2 * 64**3)
    classes = {row: {op.op_class for op in ops[row]} for row in ops}
    assert "grouped product" in classes["layer"] and "optimizer" not in classes["layer"]
    assert {"grouped product", "attention", "optimizer"} <= classes["training step"]
    assert not {"attention", "optimizer"} & classes["head"]
