"""Rollouts kept in a checkpoint: used only if this run would draw the same ones, and by all
ranks or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.errors import RunError
from megatron_gspo.loop.generation import DataCursor, Rollout
from megatron_gspo.loop.rollout_cache import _FILE, RolloutCache
from tests.support.collapse_noise import noise_section
from tests.support.distributed import run_distributed
from tests.support.samples import make_prompt, make_sample
from tests.support.training_runs import base_config

PROMPTS = [make_prompt(i) for i in range(4)]


def cache(engine: str = "mine.Engine", prompts=PROMPTS, **sections: Any) -> RolloutCache:
    config = base_config("model", "run", **sections)
    config["data"]["verifier"] = "exact_match"
    return RolloutCache(Config.from_dict(config), prompts, engine)


def drawn() -> Rollout:
    samples = [
        make_sample(2, 3, seed=i, prompt_index=i, reward=float(i), text=f"{i}") for i in range(3)
    ]
    rank = dist.get_rank()
    world = dist.get_world_size()
    held_positions = range(rank, len(samples), world)
    batch = SampleBatch.gathered(
        [samples[i] for i in held_positions], held_positions, dist.group.WORLD
    )
    return Rollout(batch, DataCursor(5, (3, 4)), {"groups/generated": 3.0})


def same(a: Rollout, b: Rollout) -> bool:
    samples = zip(a.batch.samples, b.batch.samples, strict=True)
    return (
        (a.cursor, a.metrics) == (b.cursor, b.metrics)
        and np.array_equal(a.batch.table, b.batch.table)
        and list(a.batch.held) == list(b.batch.held)
        and all(
            np.array_equal(x.tokens, y.tokens) and (x.reward, x.text) == (y.reward, y.text)
            for x, y in samples
        )
    )


def kept_and_read(rank: int, world: int, folder: str) -> list[Any]:
    """The same run, changed ones, and one whose ranks disagree about the conditions."""
    at = Path(folder)
    as_expected: list[Any] = [cache().read(at) is None]
    first = cache().read_or_draw(at, drawn)
    again = cache().read_or_draw(at, lambda: pytest.fail("they are kept"))
    as_expected += [same(first, drawn()), same(again, drawn())]
    # a condition that differs on another rank, as a file that only rank 0's node has
    cache_of_rank = cache() if rank == 0 else cache("of.another.Rank")
    as_expected.append(same(cache_of_rank.read(at), drawn()))
    as_expected.append(cache("other.Engine").read(at) is None)
    as_expected.append(cache(rollout={"temperature": 0.5}).read(at) is None)
    as_expected.append(cache(algorithm={"dynamic_sampling": True}).read(at) is None)
    as_expected.append(cache(routing=noise_section(strength=0.5)).read(at) is None)
    as_expected.append(
        cache(prompts=[make_prompt(i, text="other") for i in range(4)]).read(at) is None
    )
    as_expected.append(cache(training={"steps": 99}).read(at) is not None)
    return as_expected


def test_kept_rollouts_are_used_by_all_ranks_or_none(tmp_path):
    assert run_distributed(kept_and_read, 2, str(tmp_path)) == [[True] * 10] * 2
    assert [path.name for path in tmp_path.iterdir()] == [_FILE]


def damaged(rank: int, world: int, folder: str) -> list[bool]:
    at = Path(folder)
    cache().write(at, drawn())
    whole = (at / _FILE).read_bytes()
    is_refused = []
    changed = whole.replace(b'"parts": [[', b'"parts": [[1')
    for content in (
        whole[:-3],
        bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]]),
        changed,
        b"",
        b"{}\n",
        b"\xff\n",
    ):
        (at / _FILE).write_bytes(content)
        is_refused.append(cache().read(at) is None)
    return is_refused


def test_a_damaged_file_is_not_used(tmp_path):
    assert run_distributed(damaged, 1, str(tmp_path)) == [[True] * 6]


def without_a_checkpoint(rank: int, world: int, folder: str) -> None:
    assert same(cache().read_or_draw(None, drawn), drawn())
    missing = Path(folder) / "nowhere"
    assert same(cache().read_or_draw(missing, drawn), drawn()), (
        "that they can't be kept has no other effect"
    )
    rollout = {"engine": "sft", "rollout_batch_size": 8, "n_samples_per_prompt": 1}
    sft = cache(algorithm={"name": "sft"}, rollout=rollout)
    sft.read_or_draw(Path(folder), drawn)
    unwritable = Rollout(
        SampleBatch.of([make_sample(1, 1, metadata={"x": {1, 2}})]), DataCursor(), {}
    )
    assert cache().read_or_draw(Path(folder), lambda: unwritable) is unwritable
    assert list(Path(folder).iterdir()) == []


def test_nothing_is_kept_without_a_checkpoint(tmp_path):
    run_distributed(without_a_checkpoint, 1, str(tmp_path))


def batches_of_steps(rank: int, world: int, folder: str) -> list[Any]:
    """A batch is written by any run, read by half of one, and for training under any settings."""
    training = {"batches": folder}
    whole = cache(training=training)
    whole.of_step(0, None, drawn)
    file = Path(folder) / "step_000001"
    as_expected = [same(cache().read(file), drawn())]
    again = whole.of_step(0, None, lambda: replaced(drawn()))
    as_expected.append(again.cursor == DataCursor(9, ()))  # a whole run draws
    trains = cache(
        "other.Engine", training=training | {"only": "train"}, rollout={"temperature": 0.5}
    )
    train_again = trains.of_step(0, None, lambda: pytest.fail("it is written"))
    as_expected.append(train_again.cursor == DataCursor(9, ()))
    rolls = cache(training=training | {"only": "rollout"})
    kept = rolls.of_step(0, None, lambda: pytest.fail("it is written"))
    as_expected.append(kept.cursor == DataCursor(9, ()))
    as_expected.append(same(rolls.of_step(1, None, drawn), drawn()))
    with pytest.raises(RunError, match="has no batch of step 3 that can be used; write it with"):
        trains.of_step(2, None, drawn)
    others = cache(
        prompts=[make_prompt(i, text="other") for i in range(4)],
        training=training | {"only": "train"},
    )
    with pytest.raises(RunError, match="has no batch of step 1"):
        others.of_step(0, None, drawn)
    return as_expected


def replaced(rollout: Rollout) -> Rollout:
    return Rollout(rollout.batch, DataCursor(9, ()), rollout.metrics)


def test_batches_of_steps_are_written_and_read(tmp_path: Path) -> None:
    results = run_distributed(batches_of_steps, 2, str(tmp_path))
    assert results == [[True] * 5] * 2


def unwritten_batches(rank: int, world: int, folder: str) -> list[str]:
    """What each rank raises where a batch, the only output of half of a run, can't be written; and
    of a whole run, which has others."""
    at = Path(folder)
    training = {"batches": folder, "only": "rollout"}
    raised = []

    def draws(step: int, rollout: Rollout, **changed: Any) -> None:
        with pytest.raises(RunError) as error:
            cache(training=training | changed).of_step(step, None, lambda: rollout)
        raised.append(str(error.value))
        assert not (at / f"step_{step + 1:06d}" / f"{_FILE}.tmp").exists()

    if rank == 0:
        (at / "step_000001").mkdir()
        (at / "step_000001" / f"{_FILE}.tmp").symlink_to("/dev/full")
        (at / "step_000002" / _FILE / "full").mkdir(parents=True)
        (at / "file").touch()
    dist.barrier()
    draws(0, drawn())
    draws(1, drawn())
    unwritable = drawn()
    for sample in unwritable.batch.samples[:rank]:  # of rank 1 alone
        sample.metadata["x"] = {1, 2}
    draws(2, unwritable)
    whole = cache(training={"batches": folder})
    assert same(whole.of_step(1, None, drawn), drawn())
    draws(0, drawn(), batches=str(at / "file"), only=None)
    return raised


def test_a_batch_that_cannot_be_written_ends_half_a_run_on_every_rank(tmp_path: Path) -> None:
    first, second = run_distributed(unwritten_batches, 2, str(tmp_path))
    assert first == second
    for error, words in zip(
        first,
        (
            f"{tmp_path}/step_000001/{_FILE}.tmp: cannot be written: no space left on device (",
            f"{tmp_path}/step_000002/{_FILE}.tmp: cannot be written: is a directory (",
            f"{tmp_path}/step_000003: cannot be written: the samples cannot be encoded (TypeError: ",
            f"{tmp_path}/file/step_000001: cannot be written: not a directory (",
        ),
        strict=True,
    ):
        assert error.startswith(words) and "; " in error
