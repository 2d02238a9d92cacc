"""Our side of ``loop_vs_trl.py``: the whole training loop, one process, in segments of
``--rollouts`` rollouts.

It runs ``megatron_gspo.train.train`` as the command line does. The engine is the embedded one
behind a wrapper that counts tokens and waits at segment bounds; with ``--fixed-length`` it has no
end token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.config import Config, SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop import training_loop
from megatron_gspo.loop.timers import Timers
from megatron_gspo.rollout.embedded.embedded_engine import EmbeddedEngine
from megatron_gspo.rollout.wrapped_engine import WrappedEngine

NEVER = -1  # an end token that no vocabulary holds
PHASES = {
    "train": "training",
    "generate": "generation",
    "log_probs": "scoring",
    "verify": "scoring",
    "routing": "routing",
    "weight_sync": "weight_sync",
}


def reward(response: str, prompt: Any) -> float:
    """1 where the response's first character has an even code, so that groups have a spread."""
    return float(bool(response) and ord(response[0]) % 2 == 0)


class Finished(BaseException):
    """No further segment is wanted."""


class Clock(Timers):
    """The loop's own timers; keeps seconds and CPU seconds of every phase since ``start``."""

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self) -> None:
        self.phases = defaultdict(
            lambda: [0.0, 0.0], {name: [0.0, 0.0] for name in PHASES.values()}
        )
        self.begin = (time.perf_counter(), time.process_time())
        self.tokens = 0
        self.response_tokens = 0
        self.rollouts = 0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter(), time.process_time()
        try:
            with super().__call__(phase):
                yield
        finally:
            # A phase in which ``start`` was called counts from there.
            spent = self.phases[PHASES.get(phase, phase)]
            spent[0] += time.perf_counter() - max(begin[0], self.begin[0])
            spent[1] += time.process_time() - max(begin[1], self.begin[1])

    def report(self, mini_batches: int) -> dict[str, Any]:
        whole = [time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]]
        spans = {"loop": whole, **self.phases}
        return {
            **{name: {"seconds": wall, "cpu_seconds": cpu} for name, (wall, cpu) in spans.items()},
            "steps": self.rollouts * mini_batches,
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
        }


class PacedEngine(WrappedEngine):
    """Waits before the first rollout of a segment."""

    def __init__(self, engine: EmbeddedEngine, clock: Clock, args: argparse.Namespace) -> None:
        super().__init__(engine)
        self.clock = clock
        self.args = args
        self.left = args.warmup_rollouts

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        if self.left == 0:
            print("@@ " + json.dumps(self.clock.report(self.args.mini_batches)), flush=True)
            if not sys.stdin.readline():
                raise Finished
            self.left = self.args.rollouts
            self.clock.start()
        self.left -= 1
        samples = self.engine.generate(prompts, sampling, seed=seed)
        self.clock.rollouts += 1
        self.clock.tokens += sum(sample.length for sample in samples)
        self.clock.response_tokens += sum(sample.response_length for sample in samples)
        return samples


def config(args: argparse.Namespace, run_dir: str) -> Config:
    """GSPO with everything off that TRL's run doesn't do either: evaluation, checkpoints,
    sample files, picture.
    """
    sequences = args.samples * args.prompts_per_rollout
    return Config.from_dict(
        {
            "seed": args.seed,
            "run_dir": run_dir,
            "model": {"path": args.model, "dtype": "float32"},
            "algorithm": {
                "name": "gspo",
                "epsilon_low": args.clip_low,
                "epsilon_high": args.clip_high,
                "old_log_probs": "recompute",
            },
            "data": {
                "prompts": str(args.prompts),
                "answer_key": None,
                "max_prompt_length": 64,
                "verifier": f"{__file__}:reward",
                "verifier_timeout": None,
            },
            "rollout": {
                "rollout_batch_size": args.prompts_per_rollout,
                "n_samples_per_prompt": args.samples,
                "max_response_length": args.max_response_length,
            },
            "training": {
                "steps": 1_000_000,
                "global_batch_size": sequences // args.mini_batches,
                "max_tokens_per_micro_batch": args.max_tokens,
            },
            "optimizer": {"lr": args.learning_rate, "weight_decay": 0.0, "clip_grad": 1.0},
            "checkpoint": {"export_hf": False},
            "tracking": {"plot": False, "samples_per_step": 0},
        }
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="local Hugging Face directory with weights and tokenizer")
    add("--prompts", required=True, type=Path, help='JSONL of {"prompt": text}')
    for name, default in {
        "--samples": 8,
        "--prompts-per-rollout": 32,
        "--mini-batches": 4,
        "--rollouts": 2,
        "--warmup-rollouts": 2,
        "--max-response-length": 24,
        "--seed": 0,
        "--max-tokens": 8192,
    }.items():
        add(name, type=int, default=default)
    for name, value in {"--learning-rate": 3e-4, "--clip-low": 3e-4, "--clip-high": 4e-4}.items():
        add(name, type=float, default=value)
    add("--fixed-length", action="store_true", help="every response runs to --max-response-length")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    clock = Clock()
    training_loop.Timers = lambda: clock
    with tempfile.TemporaryDirectory() as run_dir:
        checked = config(args, run_dir)
        from transformers import AutoTokenizer

        engine = EmbeddedEngine(args.model, tokenizer=AutoTokenizer.from_pretrained(args.model))
        if args.fixed_length:
            engine.eos_token_ids = (NEVER,)
        try:
            training_loop.train(checked, engine=PacedEngine(engine, clock, args))
        except Finished:
            pass


if __name__ == "__main__":
    main()
