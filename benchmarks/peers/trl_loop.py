"""TRL's side of `loop_vs_trl.py`: its `GRPOTrainer` at sequence level (GSPO) on one core.

Runs in TRL's own virtual environment and imports nothing of this project. It reports after the
warm-up and then after every `--rollouts` rollouts, and each time waits for a line on standard input
before it continues; it ends when that is closed. A report is a line on standard output that starts
with `@@ ` and holds one JSON object.

A *step* is one optimizer step; a *rollout* is one round of generation and `--mini-batches` steps on
it. Warm-up rollouts are in no figure. Tokens: prompt and response of the trained sequences, without
padding. `loop` is everything; `training` is forward, backward and optimizer; `generation` and
`scoring` (rewards, old log-probs) are the rest. `cpu_seconds` well below `seconds` means that other
work held the machine.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="local Hugging Face directory with weights and tokenizer")
    add(
        "--prompts",
        required=True,
        type=Path,
        help='JSONL of {"prompt": text, "answer": text (optional)}',
    )
    add("--samples", type=int, default=8, help="responses per prompt")
    add("--prompts-per-rollout", type=int, default=32)
    add("--mini-batches", type=int, default=4, help="optimizer steps per rollout")
    add("--rollouts", type=int, default=10, help="timed rollouts")
    for name, default in {"--warmup-rollouts": 2, "--max-response-length": 24, "--seed": 0}.items():
        add(name, type=int, default=default)
    add(
        "--fixed-length",
        action="store_true",
        help="no end token: every response runs to --max-response-length",
    )
    for name, default in {"--learning-rate": 3e-4, "--clip-low": 3e-4, "--clip-high": 4e-4}.items():
        add(name, type=float, default=default)
    add(
        "--experts-implementation",
        default="eager",
        help="of Transformers; eager is fastest on one CPU core",
    )
    args = parser.parse_args()
    if args.samples * args.prompts_per_rollout % args.mini_batches:
        parser.error("--mini-batches must divide --samples times --prompts-per-rollout")
    return args


NEVER = -1  # an end token that no vocabulary holds


def reward(completions, answer, **_) -> list[float]:
    """1 for the exact answer; without an answer, 1 where the first character's code is even:
    groups have a spread.
    """
    rows = zip(completions, answer, strict=True)
    return [
        float(bool(text) and ord(text[0]) % 2 == 0 if want is None else text == want)
        for text, want in rows
    ]


def now() -> np.ndarray:
    """[wall-clock seconds, CPU seconds of this process]."""
    return np.array([time.perf_counter(), time.process_time()])


class TimedTrainer(GRPOTrainer):
    """`GRPOTrainer` that adds up [wall, CPU] seconds by phase, and tokens, since the last
    `start_clock`.
    """

    def start_clock(self) -> None:
        self.seconds = {
            name: np.zeros(2) for name in ("loop", "generation", "sampling_and_scoring", "steps")
        }
        self.steps = 0
        self.tokens = 0
        self.response_tokens = 0
        self.start = now()

    def report(self) -> dict:
        loop, generation, sampled, steps = self.seconds.values()
        spans = {"loop": loop, "training": steps - sampled, "generation": generation}
        spans["scoring"] = sampled - generation
        report = {
            name: {"seconds": wall, "cpu_seconds": cpu} for name, (wall, cpu) in spans.items()
        }
        return report | {key: getattr(self, key) for key in ("steps", "tokens", "response_tokens")}

    def _generate(self, *args, **kwargs):
        begin = now()
        output = super()._generate(*args, **kwargs)
        self.seconds["generation"] += now() - begin
        return output

    def _generate_and_score_completions(self, inputs):
        begin = now()
        output = super()._generate_and_score_completions(inputs)
        self.seconds["sampling_and_scoring"] += now() - begin
        responses = int(output["completion_mask"].sum())
        self.response_tokens += responses
        self.tokens += responses + int(output["prompt_mask"].sum())
        return output


class Clock(TrainerCallback):
    """Times whole steps (the optimizer runs outside `training_step`), reports, and waits for
    its turn.
    """

    def __init__(self, args: argparse.Namespace):
        self.warmup_steps = args.warmup_rollouts * args.mini_batches
        self.segment_steps = args.rollouts * args.mini_batches
        self.trainer = None
        self.begin = now()

    def on_step_begin(self, args, state, control, **_):
        self.begin = now()

    def on_step_end(self, args, state, control, **_):
        trainer = self.trainer
        end = now()
        trainer.seconds["steps"] += end - self.begin
        trainer.seconds["loop"] = end - trainer.start
        trainer.steps += 1
        after_warmup = state.global_step - self.warmup_steps
        if after_warmup >= 0 and after_warmup % self.segment_steps == 0:
            print("@@ " + json.dumps(trainer.report()), flush=True)
            control.should_training_stop = not sys.stdin.readline()
            trainer.start_clock()


def build_trainer(args: argparse.Namespace, output_dir: str) -> TimedTrainer:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if mixture := hasattr(model.config, "output_router_logits"):
        model.set_experts_implementation(args.experts_implementation)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    data = datasets.Dataset.from_list(
        [{"prompt": r["prompt"], "answer": r.get("answer")} for r in rows]
    )
    length = args.max_response_length
    sequences = args.samples * args.prompts_per_rollout
    config = GRPOConfig(
        output_dir=output_dir,
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        scale_rewards="group",
        # None would add the model config's own coefficient.
        router_aux_loss_coef=(0.0 if mixture else None),
        epsilon=args.clip_low,
        epsilon_high=args.clip_high,
        temperature=1.0,
        max_completion_length=length,
        generation_kwargs={"eos_token_id": [NEVER]} if args.fixed_length else None,
        num_generations=args.samples,
        steps_per_generation=args.mini_batches,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=sequences // args.mini_batches,
        max_steps=10**9,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = Clock(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    clock.trainer = TimedTrainer(
        model, reward, config, data, processing_class=tokenizer, callbacks=[clock]
    )
    if args.fixed_length:
        clock.trainer.eos_token_ids = [NEVER]
    return clock.trainer


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(args, output_dir)
        trainer.start_clock()
        trainer.train()


if __name__ == "__main__":
    main()
