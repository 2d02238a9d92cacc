"""Mini-batches and the metrics of updates."""

from megatron_gspo.loop.optimizer_steps import mini_batches


def test_mini_batches_are_a_partition_drawn_anew_each_step_and_epoch():
    found = {
        (seed, step, epoch): mini_batches(50, 16, seed=seed, step=step, epoch=epoch)
        for seed in range(2) for step in range(2) for epoch in range(2)
    }  # fmt: skip
    for rows in found.values():
        assert [len(row) for row in rows] == [16, 16, 16, 2]
        assert sorted(sum(rows, [])) == list(range(50))
    assert len({str(rows) for rows in found.values()}) == len(found)
    assert mini_batches(50, 16, seed=1, step=1, epoch=1) == found[1, 1, 1]
