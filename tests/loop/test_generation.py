"""Prompts to groups: seeds, the data cursor, dynamic sampling, and what is in flight while
training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from megatron_gspo.config import Config
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompts import PromptSource
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import SampleBatch, rows_of
from megatron_gspo.loop.generation import DataCursor, RolloutGenerator, next_prompts, rollout_seed
from megatron_gspo.loop.rollout_log import rollout_record
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rollout.in_process_source import InProcessSource
from tests.support.samples import ReadItems, make_prompt, make_sample
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_servers import (
    scripted_response,
)
from tests.support.training_runs import base_config

PROMPTS = PromptSource([make_prompt(i) for i in range(10)], shuffle=False)


class Source(InProcessSource):
    """Records its prompts, in this process alone."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(scripted_response), vocab_size=1000)
        self.submitted: list[tuple[list[int], int]] = []
        self.oldest: list[int | None] = []
        self.paused: list[bool] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Any, *, seed: int) -> None:
        self.submitted.append(([prompt.index for prompt in prompts], seed))
        super().submit(prompts, sampling, seed=0)

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        self.oldest.append(oldest_version)
        return super().collect(count, oldest_version=oldest_version)

    def pause(self, *, keep: bool) -> None:
        self.paused.append(keep)
        super().pause(keep=keep)


@dataclass
class Rewards:
    """1 for one sample of a group; 1 for all of those whose prompt is in ``equal``; NaN for all
    if it fails.
    """

    equal: set[int] = field(default_factory=set)
    fails: bool = False
    name: str = "verifier 'mine'"

    def __call__(self, batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers) -> Any:
        samples = batch.samples
        assert all(prompts[sample.prompt_index].index == sample.prompt_index for sample in samples)
        rewards = [
            float("nan") if self.fails else float(self._solved(sample)) for sample in samples
        ]
        return batch.with_rewards(np.array(rewards)), Counter(
            error=len(samples) if self.fails else 0
        )

    def _solved(self, sample: Sample) -> bool:
        return sample.prompt_index in self.equal or sample.sample_index == 0

    def close(self) -> None: ...


def generator(
    rewards: Rewards | None = None, *, prompts: PromptSource = PROMPTS, **sections: Any
) -> RolloutGenerator:
    rollout = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, **sections.pop("rollout", {})}
    sections = {"training": {"global_batch_size": 6}, **sections}
    config = base_config("model", "run", rollout=rollout, **sections)
    return RolloutGenerator(Source(), prompts, rewards or Rewards(), Config.from_dict(config))


def indices(batch: SampleBatch) -> list[int]:
    prompt_indices = [sample.prompt_index for sample in batch.samples]
    assert prompt_indices == batch.table["prompt_index"].tolist()
    return prompt_indices


def test_every_step_of_every_run_has_a_sampling_seed_of_its_own():
    seeds = {(seed, step): rollout_seed(seed, step) for seed in range(4) for step in range(200)}
    assert len(set(seeds.values())) == len(seeds)
    assert all(rollout_seed(*key) == value for key, value in seeds.items())


def test_a_step_draws_the_next_prompts():
    made = generator()
    rollout = made.draw(4, DataCursor(2), Timers())
    assert indices(rollout.batch) == [2, 2, 3, 3, 4, 4] and rollout.cursor == DataCursor(5)
    assert made.groups.submitted == [([2, 3, 4], rollout_seed(7, 4))]
    assert made.groups.oldest == [None]
    assert rollout.metrics == {"verifier/error": 0.0, "groups/generated": 3.0}
    assert made.prepare_for_training(4, rollout.cursor) == DataCursor(5)
    assert made.groups.paused == [False]


class Idle(Source):
    """As a rank that is no client: it knows the rows of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[int] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Any, *, seed: int) -> None:
        self.waiting += ChosenPrompts.of(prompts).indices

    def pending(self) -> list[int]:
        return self.waiting

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        indices = self.waiting[:count]
        self.waiting = self.waiting[count:]
        batch = SampleBatch.of(
            [make_sample(1, 2, prompt_index=i, sample_index=j) for i in indices for j in (0, 1)]
        )
        return replace(batch, held={})


class Known(Rewards):
    def __call__(self, batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers) -> Any:
        return batch.with_rewards(batch.table["sample_index"].astype(float)), Counter(error=0)


def test_a_rank_without_requests_reads_no_prompt():
    data = ReadItems(PROMPTS.prompts)
    for sections in ({}, {"rollout": {**SERVERS, "oversampling": 1.5}, "sglang": SGLANG}):
        made = replace(
            generator(Known(), prompts=PromptSource(data, shuffle=False), **sections), groups=Idle()
        )
        drawn = made.draw(0, DataCursor(), Timers())
        made.prepare_for_training(0, drawn.cursor)
        assert drawn.batch.table["prompt_index"].tolist() == [0, 0, 1, 1, 2, 2]
    assert data.read == []


def test_dynamic_sampling_replaces_groups_of_equal_rewards():
    made = generator(
        Rewards(equal={0, 2, 3}), algorithm={"dynamic_sampling": True, "max_num_gen_batches": 3}
    )
    rollout = made.draw(5, DataCursor(), Timers())
    assert [taken for taken, _ in made.groups.submitted] == [[0, 1, 2], [3, 4], [5]]
    assert [seed for _, seed in made.groups.submitted] == [
        rollout_seed(7, 15 + attempt) for attempt in range(3)
    ]
    assert indices(rollout.batch) == [1, 1, 4, 4, 5, 5] and rollout.cursor == DataCursor(6)
    assert rollout.metrics["groups/generated"] == 6.0


def test_groups_of_equal_rewards_stay_after_the_last_generation():
    made = generator(
        Rewards(equal={0, 2, 3}), algorithm={"dynamic_sampling": True, "max_num_gen_batches": 1}
    )
    assert indices(made.draw(0, DataCursor(), Timers()).batch) == [0, 0, 1, 1, 2, 2]
    made = generator(
        Rewards(equal=set(range(10))),
        algorithm={"dynamic_sampling": True, "max_num_gen_batches": 2},
    )
    rollout = made.draw(0, DataCursor(), Timers())
    assert indices(rollout.batch) == [0, 0, 1, 1, 2, 2]
    assert rollout.metrics["groups/generated"] == 6.0


def test_a_small_data_set_is_not_used_twice_in_a_step():
    few = PromptSource([make_prompt(i) for i in range(4)], shuffle=False)
    algorithm = {"dynamic_sampling": True, "max_num_gen_batches": 4}
    made = generator(Rewards(equal=set(range(4))), prompts=few, algorithm=algorithm)
    rollout = made.draw(0, DataCursor(), Timers())
    taken = [index for submitted, _ in made.groups.submitted for index in submitted]
    assert len(taken) == len(set(taken)) and len(rollout.batch) == 6


SERVERS = {"engine": "sglang"}
SGLANG = {"urls": ["http://a:1"]}


class LastFirst(Source):
    """Servers that finish the group first that was submitted last. waiting: groups that were not
    collected when a part was scored."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[int] = []

    def collect(self, count: int, *, oldest_version: int | None = None) -> SampleBatch:
        self._requests.reverse()
        taken = super().collect(count, oldest_version=oldest_version)
        self._requests.reverse()
        return taken.select(np.argsort(taken.table["prompt_index"], kind="stable"))

    def scores(self, rewards: Rewards) -> Any:
        def scored(batch: SampleBatch, prompts: Sequence[Prompt], timers: Timers) -> Any:
            self.waiting.append(len(self.pending()))
            return rewards(batch, prompts, timers)

        scored.name = rewards.name
        return scored


@pytest.mark.parametrize(
    ("workers", "waiting"),
    [(1, [7, 5, 3, 1, 0]), (7, [5, 1, 0]), (99, [0])],
    ids=["parts", "workers", "one"],
)
def test_servers_generate_while_the_first_groups_are_scored(workers, waiting, monkeypatch):
    monkeypatch.setattr("megatron_gspo.loop.generation._PARTS", 5)
    size = {"rollout_batch_size": 9}
    sections = {
        "rollout": {**SERVERS, **size},
        "sglang": SGLANG,
        "data": {"verifier_workers": workers},
    }
    served = generator(**sections)
    source = LastFirst()
    rollout = replace(served, groups=source, rewards=source.scores(Rewards())).draw(
        1, DataCursor(), Timers()
    )
    assert source.waiting == waiting
    at_once = generator(rollout=size).draw(1, DataCursor(), Timers())
    assert rollout.cursor == at_once.cursor and rollout.metrics == at_once.metrics
    assert np.array_equal(rollout.batch.table, at_once.batch.table)
    assert indices(rollout.batch) == indices(at_once.batch)


def test_what_is_generated_at_once_is_scored_at_once():
    source = LastFirst()
    made = replace(
        generator(rollout={"rollout_batch_size": 9}),
        groups=source,
        rewards=source.scores(Rewards()),
    )
    made.draw(0, DataCursor(), Timers())
    assert source.waiting == [0]


def test_oversampled_groups_are_discarded_and_their_prompts_come_first():
    made = generator(rollout={**SERVERS, "oversampling": 1.5}, sglang=SGLANG)
    rollout = made.draw(0, DataCursor(), Timers())
    assert made.groups.submitted == [([0, 1, 2, 3, 4], rollout_seed(7, 0))]
    assert indices(rollout.batch) == [0, 0, 1, 1, 2, 2] and rollout.cursor == DataCursor(5, (3, 4))
    assert made.prepare_for_training(0, rollout.cursor) == rollout.cursor
    assert made.groups.paused == [False] and made.groups.pending() == []
    rollout = made.draw(1, rollout.cursor, Timers())
    assert made.groups.submitted[1:] == [([3, 4, 5, 6, 7], rollout_seed(7, 1))]
    assert rollout.cursor == DataCursor(8, (6, 7))


def test_stale_groups_continue_and_a_resumed_run_begins_them_again():
    made = generator(rollout={**SERVERS, "oversampling": 1.5, "max_staleness": 2}, sglang=SGLANG)
    rollout = made.draw(6, DataCursor(), Timers())
    assert set(made.groups.oldest) == {4} and rollout.cursor == DataCursor(5, (3, 4))
    made.prepare_for_training(6, rollout.cursor)
    assert made.groups.paused == [True] and made.groups.pending() == [3, 4]
    resumed = replace(made, groups=Source())
    resumed.draw(7, rollout.cursor, Timers())
    made.draw(7, rollout.cursor, Timers())
    assert made.groups.submitted[1:] == [([5, 6, 7], rollout_seed(7, 7))], (
        "two of the five were in flight"
    )
    assert resumed.groups.submitted == [([3, 4, 5, 6, 7], rollout_seed(7, 7))]


SFT = {
    "algorithm": {"name": "sft"},
    "rollout": {"engine": "sft", "n_samples_per_prompt": 1},
    "training": {"global_batch_size": 3},
}


@pytest.mark.parametrize("sections", [{}, SFT], ids=["sampled", "sft"])
@pytest.mark.parametrize(
    ("cursor", "taken", "after"),
    [
        (DataCursor(5, (3, 4)), [3, 4, 5], DataCursor(6)),
        (DataCursor(9, (3, 4, 5, 6)), [3, 4, 5], DataCursor(9, (6,))),
        (DataCursor(5, (3, 12)), [3, 5, 6], DataCursor(7)),
    ],
    ids=["fewer", "more", "gone"],
)
def test_pending_prompts_of_a_run_that_oversampled_come_first(sections, cursor, taken, after):
    made = generator(**sections)
    rollout = made.draw(1, cursor, Timers())
    assert [submitted for submitted, _ in made.groups.submitted] == [taken]
    assert sorted(set(indices(rollout.batch))) == taken and rollout.cursor == after


def test_with_overlap_the_next_steps_groups_are_submitted_before_training():
    made = generator(rollout={**SERVERS, "max_staleness": 2, "overlap": True}, sglang=SGLANG)
    rollout = made.draw(0, DataCursor(), Timers())
    cursor = made.prepare_for_training(0, rollout.cursor)
    assert made.groups.paused == [] and cursor == DataCursor(9, (3, 4, 5, 6, 7, 8))
    assert made.groups.submitted == [
        ([0, 1, 2], rollout_seed(7, 0)),
        ([3, 4, 5, 6, 7, 8], rollout_seed(7, 1)),
    ]
    resumed = replace(made, groups=Source())
    resumed.prepare_for_training(0, DataCursor(10, tuple(range(3, 10))))
    assert resumed.groups.pending() == [3, 4, 5, 6, 7, 8], "a further one would be too old"


def test_the_cursor_is_filled_with_prompts_that_are_not_used():
    assert next_prompts(PROMPTS, DataCursor(), 4, {1}) == DataCursor(5, (0, 2, 3, 4))
    assert next_prompts(PROMPTS, DataCursor(5, (3, 4)), 2, set()) == DataCursor(5, (3, 4))
    few = PromptSource([make_prompt(i) for i in range(3)], shuffle=False)
    assert next_prompts(few, DataCursor(), 8, {0}).pending == (1, 2), "there are no more"


def test_the_rollout_log_has_the_versions_of_every_sample():
    mixed = make_sample(
        1, 3, seed=4, sample_index=1, weight_version=2, token_versions=np.array([2, 5, 3], np.int32)
    )
    record = rollout_record(
        rows_of([make_sample(1, 2, seed=7, weight_version=6), mixed]), DataCursor(9, (8, 5))
    )
    assert record == {"samples": [[7, 0, 6, 6], [4, 1, 2, 5]], "cursor": 9, "pending": [8, 5]}
