"""verl's way of cutting a batch, for ``packing.py``; runs in the peers' environment, in turns (``turns.py``).

    python benchmarks/peers/verl_partitions.py TASKS.json PLANS.json

``TASKS.json``: a list of ``{"lengths", "ranks", "max_tokens", "multiple_of"}``; ``PLANS.json`` gets a plan
[rank][micro-batch] -> indices for each. Then each turn plans the last task again and reports its seconds.

As in verl's trainer: ``get_seqlen_balanced_partitions`` deals equally many sequences to the ranks, then cuts each
rank's into as many micro-batches as the fullest rank needs, more where one is above the limit. Balanced by tokens
(verl's default weighs long sequences more, by their estimated FLOPs), which is what the rows count.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from verl.utils.seqlen_balancing import ceildiv, get_seqlen_balanced_partitions, roundup_divisible


def micro_batches(lengths: list[int], mine: list[int], count: int) -> list[list[int]]:
    """A rank's sequences ``mine`` in ``count`` micro-batches."""
    parts = get_seqlen_balanced_partitions([lengths[i] for i in mine], count, equal_size=False)
    return [[mine[at] for at in part] for part in parts]


def fits(lengths: list[int], plan: list[list[int]], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in part) <= max_tokens for part in plan)


def counted(lengths: list[int], mine: list[int], task: dict[str, Any], least: int) -> int:
    """The fewest micro-batches, ``least`` or more, in which a rank keeps to the limit."""
    count = least
    while not fits(lengths, micro_batches(lengths, mine, count), task["max_tokens"]):
        count += task["multiple_of"]
    return count


def plan(task: dict[str, Any]) -> list[list[list[int]]]:
    """All ranks' micro-batches."""
    lengths = task["lengths"]
    ranks = get_seqlen_balanced_partitions(lengths, task["ranks"], equal_size=True)
    fewest = max(ceildiv(sum(lengths[i] for i in mine), task["max_tokens"]) for mine in ranks)
    count = roundup_divisible(fewest, task["multiple_of"])
    while True:
        found = [micro_batches(lengths, mine, count) for mine in ranks]
        if all(fits(lengths, parts, task["max_tokens"]) for parts in found):
            return found
        count += task["multiple_of"]


def one_rank(task: dict[str, Any]) -> None:
    """What the controller and one rank do: the ranks partition their parts in parallel."""
    lengths = task["lengths"]
    mine = get_seqlen_balanced_partitions(lengths, task["ranks"], equal_size=True)[0]
    counted(lengths, mine, task, ceildiv(sum(lengths[i] for i in mine), task["max_tokens"]))


def main() -> None:
    tasks = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([plan(task) for task in tasks[:-1]]))
    print("@@ {}", flush=True)
    while sys.stdin.readline():
        begin = time.perf_counter(), time.process_time()
        one_rank(tasks[-1])
        took = time.perf_counter() - begin[0], time.process_time() - begin[1]
        print("@@ " + json.dumps({"wall": took[0], "cpu": took[1]}), flush=True)


if __name__ == "__main__":
    main()
