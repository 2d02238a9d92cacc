"""Responses are generated here: prompts are drawn, submitted as groups and collected with their
rewards.

| ``rollout``                    | groups in flight in a step           | groups that a step leaves unfinished         |
| ------------------------------ | ------------------------------------ | -------------------------------------------- |
| default                        | those that it trains on              | none                                         |
| ``oversampling`` alone         | ``oversampling`` times as many       | discarded; their prompts are generated again |
| the same and ``max_staleness`` | as many as bring it to that number   | paused while training, then continued        |
| ``max_staleness``, ``overlap`` | those of ``max_staleness`` steps     | continue while training, over weight updates |

Groups are collected in the order in which they were submitted, as far as they are finished; from
servers in parts, each of which is scored while the servers generate the others. Groups with tokens
that would be older than ``max_staleness`` before a later step can take them are waited for, so long
responses are neither dropped nor deferred.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.chosen_prompts import ChosenPrompts
from megatron_gspo.data.prompts import PromptSource
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.loop.reward_scoring import Rewards, in_varied_group, require_scores
from megatron_gspo.loop.timers import Timers
from megatron_gspo.parallel.collectives import group_size
from megatron_gspo.rollout.group_source import GroupSource

_PARTS = 8  # of a step's groups, which are scored one after another
_TRIES = 3  # batches without a new prompt, after which a small data set has no more


@dataclass(frozen=True)
class DataCursor:
    """Position in the training prompts."""

    drawn: int = 0
    """Prompts drawn so far."""

    pending: tuple[int, ...] = ()
    """Indices of the drawn prompts that are not trained on yet, in the order in which they were
    drawn; a resumed run begins with them."""


@dataclass(frozen=True)
class Rollout:
    """One scored rollout batch, on the ranks that generated it, and the position in the prompts
    after it.
    """

    batch: SampleBatch
    cursor: DataCursor
    metrics: dict[str, float]


def rollout_seed(seed: int, step: int) -> int:
    """A step's sampling seed: rollouts depend on (seed, step, prompt, sample) alone, so a
    resumed run repeats them.
    """
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


@dataclass(frozen=True)
class RolloutGenerator:
    """Draws one scored rollout batch a step."""

    groups: GroupSource
    prompts: PromptSource
    rewards: Rewards
    config: Config

    def draw(self, step: int, cursor: DataCursor, timers: Timers) -> Rollout:
        """The rollout batch of a step.

        With dynamic sampling, groups whose rewards are all equal are replaced by groups of other
        prompts. If some are left after the last generation, they stay in the batch with an
        advantage of 0.
        """
        config = self.config
        if config.algorithm.is_supervised:
            return self._reference_answers(cursor, timers)
        size = config.rollout.rollout_batch_size
        n = config.rollout.n_samples_per_prompt
        generations = (
            config.algorithm.max_num_gen_batches if config.algorithm.dynamic_sampling else 1
        )
        varied = equal = SampleBatch.of([])
        failures: Counter[str] = Counter()
        generated = 0
        for attempt in range(generations):
            used = set(np.concatenate([varied.table, equal.table])["prompt_index"].tolist())
            missing = size - len(varied) // n
            in_flight = math.ceil(missing * config.rollout.oversampling)
            cursor = self._submit(cursor, in_flight, step * generations + attempt, used)
            ready = min(missing, len(cursor.pending))
            if not ready:  # all prompts of a small data set are used
                continue
            batch, counts, cursor = self._collect(ready, step, cursor, timers)
            failures.update(counts)
            generated += len(batch) // n
            keep = (
                in_varied_group(batch.table) if generations > 1 else np.ones(len(batch), dtype=bool)
            )
            varied = varied.joined(batch.select(np.flatnonzero(keep)))
            equal = equal.joined(batch.select(np.flatnonzero(~keep)))
            if len(varied) >= size * n:
                break
        require_scores(varied.joined(equal), self.rewards.name, self.prompts.prompts)
        metrics = {f"verifier/{name}": float(count) for name, count in failures.items()}
        metrics["groups/generated"] = float(generated)
        filled = equal.select(range(min(len(equal), size * n - len(varied))))
        return Rollout(varied.joined(filled), cursor, metrics)

    def prepare_for_training(self, step: int, cursor: DataCursor) -> DataCursor:
        """Submit the groups that are generated while the step trains (``rollout.overlap``), or
        pause generation.
        """
        rollout = self.config.rollout
        if not rollout.overlap:
            self.groups.pause(keep=rollout.max_staleness > 0)
            return cursor
        # no more than later steps can take: groups are trained on in this order, and the last must
        # not be too old then
        ahead = rollout.rollout_batch_size * rollout.max_staleness
        return self._submit(cursor, ahead, step + 1, set())

    def _submit(self, cursor: DataCursor, count: int, seed_step: int, used: Set[int]) -> DataCursor:
        """Bring the groups in flight to ``count``: those of the first pending prompts, which were
        discarded, are left of a run that is resumed, or are new.
        """
        cursor = next_prompts(self.prompts, cursor, count, used)
        in_flight = set(self.groups.pending())
        new = [index for index in cursor.pending[:count] if index not in in_flight]
        if new:
            seed = rollout_seed(self.config.seed, seed_step)
            self.groups.submit(
                ChosenPrompts.by_index(self.prompts.prompts, new), self.config.rollout, seed=seed
            )
        return cursor

    def _collect(
        self, count: int, step: int, cursor: DataCursor, timers: Timers
    ) -> tuple[SampleBatch, Counter[str], DataCursor]:
        """``count`` groups with their rewards, failures by kind, and the cursor without their
        prompts.
        """
        staleness = self.config.rollout.max_staleness
        oldest = step - staleness if staleness else None
        scored_at_once = self._groups_scored_at_once(count)
        submitted = {index: number for number, index in enumerate(self.groups.pending())}
        batch = SampleBatch.of([])
        failures = Counter[str]()
        for begin in range(0, count, scored_at_once):
            with timers("generate"):
                collected = self.groups.collect(
                    min(scored_at_once, count - begin), oldest_version=oldest
                )
            scored, counts = self.rewards(collected, self.prompts.prompts, timers)
            batch = batch.joined(scored)
            failures.update(counts)
        indices = batch.table["prompt_index"].tolist()
        taken = set(indices)
        cursor = DataCursor(
            cursor.drawn, tuple(index for index in cursor.pending if index not in taken)
        )
        # as if collected at once, whichever group finished first
        batch = batch.select(np.argsort([submitted[index] for index in indices], kind="stable"))
        return batch, failures, cursor

    def _groups_scored_at_once(self, count: int) -> int:
        """Groups that are scored together: all where nothing is generated meanwhile, else at least
        as many as occupy the verifier's workers of all ranks."""
        rollout = self.config.rollout
        if rollout.engine == "embedded" or self.config.samples_are_runs:
            return count
        workers = self.config.data.verifier_workers * group_size(dist.group.WORLD)
        return max(math.ceil(count / _PARTS), math.ceil(workers / rollout.n_samples_per_prompt))

    def _reference_answers(self, cursor: DataCursor, timers: Timers) -> Rollout:
        """Supervised training: the prompts' answers, without rewards."""
        size = self.config.rollout.rollout_batch_size
        with timers("generate"):
            cursor = self._submit(cursor, size, 0, set())
            batch = self.groups.collect(size)
        return Rollout(batch, DataCursor(cursor.drawn, cursor.pending[size:]), {})


def next_prompts(
    prompts: PromptSource, cursor: DataCursor, count: int, used: Set[int]
) -> DataCursor:
    """The cursor with ``count`` pending prompts, as far as the data has so many: none twice,
    none that was used.
    """
    # A run may continue with fewer prompts.
    pending = [index for index in cursor.pending if index < len(prompts)]
    drawn = cursor.drawn
    tries = 0
    while (missing := count - len(pending)) > 0 and tries < _TRIES:
        batch, drawn = prompts.batch(drawn, min(missing, len(prompts)))
        known = used | set(pending)
        new = [index for index in batch.indices if index not in known]
        tries = 0 if new else tries + 1
        pending += new
    return DataCursor(drawn, tuple(pending))
