"""One scored rollout batch: prompts drawn, responses generated and verified, groups that teach nothing drawn anew.

| ``rollout``                      | groups begun in a step             | those that a step leaves unfinished          |
| -------------------------------- | ---------------------------------- | -------------------------------------------- |
| default                          | those that it trains on            | none                                         |
| ``oversampling`` alone           | ``oversampling`` times as many     | stopped; their prompts start over            |
| the same and ``max_staleness``   | as many as bring it to that number | stopped while training, then go on           |
| ``max_staleness``, ``overlap``   | those of ``max_staleness`` steps   | go on while training, interrupted by updates |

Groups are taken in the order in which they were begun, as far as they are finished. Those with tokens that would be
older than ``max_staleness`` before a later step can take them are waited for (``stream.choose``): long responses are
neither dropped nor passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.rollout_buffer import Place, Rollout
from megatron_gspo.loop.scoring import require_scores, sample_and_score, score, varied
from megatron_gspo.loop.servers import on_first, take
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rollout.sample_exchange import generate_spread


def rollout_seed(seed: int, step: int) -> int:
    """A step's sampling seed: rollouts depend on (seed, step, prompt, sample) alone, so a resumed run repeats them."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def draw_rollout(run: Run, step: int, place: Place, timers: Timers) -> Rollout:
    """One batch of groups, scored; with ``dynamic_sampling`` groups whose rewards are all equal are replaced by newly
    generated ones, in at most ``max_num_gen_batches`` generations; those that remain are kept
    (their advantage is 0)."""
    config = run.config
    if config.algorithm.is_supervised:
        return _demonstrations(run, place, timers)
    size, n = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    generations = config.algorithm.max_num_gen_batches if config.algorithm.dynamic_sampling else 1
    kept: list[Sample] = []
    flat: list[Sample] = []
    failures: Counter[str] = Counter()
    generated = 0
    more = _from_stream if config.rollout.streams else _from_prompts
    for attempt in range(generations):
        used = {sample.prompt_index for sample in kept + flat}
        seed = rollout_seed(config.seed, step * generations + attempt)
        samples, counts, place = more(run, size - len(kept) // n, place, used, seed, timers)
        if not samples:  # a small data set has been drawn whole
            continue
        failures.update(counts)
        generated += len(samples) // n
        keep = varied(samples) if generations > 1 else [True] * len(samples)
        kept += [sample for sample, good in zip(samples, keep, strict=True) if good]
        flat += [sample for sample, good in zip(samples, keep, strict=True) if not good]
        if len(kept) >= size * n:
            break
    require_scores(run, kept + flat)
    metrics = {f"verifier/{name}": float(count) for name, count in failures.items()}
    metrics["groups/generated"] = float(generated)
    return Rollout(kept + flat[: size * n - len(kept)], place, metrics)


def _demonstrations(run: Run, place: Place, timers: Timers) -> Rollout:
    prompts, cursor = run.source.batch(place.cursor, run.config.rollout.rollout_batch_size)
    with timers("generate"):
        vocabulary = run.policy.shape.vocab_size
        samples = generate_spread(run.engine, prompts, run.sampling, seed=0, vocab_size=vocabulary)
    return Rollout(samples, Place(cursor), {})


def _from_prompts(run: Run, count: int, place: Place, used: set[int], seed: int,
                  timers: Timers) -> tuple[list[Sample], Counter[str], Place]:
    """Groups of the next ``count`` prompts, less those that the step has used."""
    prompts, cursor = run.source.batch(place.cursor, count)
    prompts = [prompt for prompt in prompts if prompt.index not in used]
    if not prompts:
        return [], Counter(), Place(cursor)
    samples, failures = sample_and_score(run, run.engine, prompts, run.sampling, seed, timers)
    return samples, failures, Place(cursor)


def _from_stream(run: Run, count: int, place: Place, used: set[int], seed: int,
                 timers: Timers) -> tuple[list[Sample], Counter[str], Place]:
    """The first ``count`` groups of the stream that finish, after filling it."""
    rollout = run.config.rollout
    place = fill(run, place, math.ceil(count * rollout.oversampling), seed, used)
    count = min(count, len(place.pending))
    if not count:
        return [], Counter(), place
    with timers("generate"):
        oldest = run.weights_version - rollout.max_staleness if rollout.max_staleness else None
        groups = take(run, run.stream, count, oldest=oldest)
    samples = [sample for group in groups for sample in group]
    taken = {sample.prompt_index for sample in samples}
    place = Place(place.cursor, tuple(index for index in place.pending if index not in taken))
    prompts = [_by_index(run, index) for index in sorted(taken)]
    return samples, score(run, samples, prompts, timers), place


def leave_servers(run: Run, place: Place, step: int) -> Place:
    """What the servers do while the trainer works on the step's samples: see the table. Where they share its GPUs, they
    give their memory back."""
    rollout = run.config.rollout
    if rollout.overlap:
        # not one more: they are trained on in this order, and the last would be too old by then
        ahead = rollout.rollout_batch_size * rollout.max_staleness
        return fill(run, place, ahead, rollout_seed(run.config.seed, step + 1), set())
    if rollout.streams:
        on_first(lambda: run.stream.stop(keep=rollout.max_staleness > 0) and None)
    if run.config.sglang.colocated:
        on_first(run.engine.pause)
    return place


def fill(run: Run, place: Place, count: int, seed: int, used: set[int]) -> Place:
    """Bring the stream to ``count`` groups: those pending that it lacks (of an earlier life of the run, or stopped),
    then new prompts. No prompt is in it twice, nor one that the step has used."""
    pending, cursor = list(place.pending), place.cursor
    tries = 0
    while (missing := count - len(pending)) > 0 and tries < 3:  # a small data set may not have so many
        drawn, cursor = run.source.batch(cursor, min(missing, len(run.source)))
        new = [prompt.index for prompt in drawn if prompt.index not in used and prompt.index not in pending]
        tries = 0 if new else tries + 1
        pending += new

    def start() -> None:
        begun = {prompt.index for prompt in run.stream.prompts}
        run.stream.start([_by_index(run, i) for i in pending if i not in begun], run.sampling, seed=seed)

    on_first(start)
    return Place(cursor, tuple(pending))


def _by_index(run: Run, index: int) -> Prompt:
    return run.source.prompts[index]


def ledger(samples: Sequence[Sample], place: Place) -> dict[str, Any]:
    """The record of ``rollouts.jsonl``: what a step trained on, by which weights, and what was begun besides."""
    rows = []
    for sample in samples:
        versions = [sample.weight_version] if sample.token_versions is None else sample.token_versions
        rows.append([sample.prompt_index, sample.sample_index, int(min(versions)), int(max(versions))])
    return {"samples": rows, "cursor": place.cursor, "pending": list(place.pending)}
