"""Which share of a demo step the metrics take, in the same run.

    torchrun --nproc-per-node 4 -m benchmarks.metrics_cost examples/qwen3_moe/tiny_gspo.yaml \
        training.steps=12 evaluation.eval_interval=0 checkpoint.save_interval=0 run_dir=runs/metrics

Needs `make demo`. Counted is the processor time of rank 0, all its threads, within the functions
that compute, reduce and write metrics, over that of the whole step; the first two steps are left
out. Without replay, what packs and moves routes serves the metrics alone, and counts too; the
entropy of the log-prob head does not: it is computed with the log-probs. A busy machine makes all
longer, and a few operations on cold caches more than others.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron_gspo.config import load_config
from megatron_gspo.loop import training_loop

_UNCOUNTED_STEPS = 2
# Where a function is looked up when it is called.
PARTS = {
    "ratio histograms": [
        "loop.optimizer_steps:_add_ratios",
        "loop.training_loop:quantiles_over_ranks",
    ],
    "rollout mismatch": [
        "loop.log_probs:mismatch",
        "loop.log_probs:_mean_of_trained",
        "loop.optimizer_steps:largest_log_ratio",
    ],
    "loss metrics": [
        "algorithms.policy_loss:ratio_metrics",
        "mcore.train_step:combined_shares",
        "loop.optimizer_steps:finished_metrics",
        "loop.optimizer_steps:averaged_metrics",
        "loop.optimizer_steps:packing_metrics",
    ],
    "routing": [
        "data.packing:_routes",
        "mcore.routing_replay.micro_batch_routes:MicroBatchRoutes.begin_chunk",
        "mcore.routing_replay.micro_batch_routes:MicroBatchRoutes.check_uses",
        "mcore.routing_replay.pass_counts:PassCounts.add",
        "loop.routing:RoutingReplay.with_old_routes",
        "loop.routing:RoutingReplay.add_update",
        "loop.routing:RoutingReplay.measure_passes",
    ],
    "samples": ["loop.training_loop:_rollout_metrics", "loop.training_loop:step_work"],
    "files": [
        "loop.training_loop:throughput",
        "loop.metrics_logging:MetricsLogger.log",
        "loop.metrics_logging:MetricsLogger.write_step",
    ],
}


class Cost:
    """Processor time by part; a function within another one is counted once."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._is_open = False

    def count(self, part: str, name: str) -> None:
        """Replace a function, ``module:function`` or ``module:Class.method``, with a timed one."""
        module, _, path = name.partition(":")
        *parents, attribute = path.split(".")
        owner: Any = importlib.import_module(f"megatron_gspo.{module}")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, self._timed(part, getattr(owner, attribute)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_open:
                return function(*args, **kwargs)
            self._is_open = True
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.process_time() - started
                self._is_open = False

        return timed


def main() -> None:
    cost = Cost()
    for part, names in PARTS.items():
        for name in names:
            cost.count(part, name)
    begun: list[tuple[float, Counter[str]]] = []
    train_step = training_loop.train_step

    @wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        begun.append((time.process_time(), cost.seconds.copy()))
        return train_step(*args, **kwargs)

    training_loop.train_step = step
    training_loop.train(load_config(sys.argv[1], sys.argv[2:]))
    if os.environ["RANK"] != "0":
        return
    (started, before), (ended, after) = begun[_UNCOUNTED_STEPS], begun[-1]
    steps = len(begun) - 1 - _UNCOUNTED_STEPS
    total = ended - started
    print(f"{steps} steps of {1e3 * total / steps:.1f} ms of processor time; of it")
    for part in PARTS:
        spent = after[part] - before[part]
        print(f"{part:20} {1e3 * spent / steps:8.2f} ms {100 * spent / total:6.2f} %")
    spent = after.total() - before.total()
    print(f"{'all metrics':20} {1e3 * spent / steps:8.2f} ms {100 * spent / total:6.2f} %")


if __name__ == "__main__":
    main()
