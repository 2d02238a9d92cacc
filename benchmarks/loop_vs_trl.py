"""Tokens per second against TRL's GRPOTrainer at sequence level: the training step and the whole loop.

Both run in one process each, on one core, from the same Hugging Face directory and prompts: 32 prompts x 8 responses a
rollout, 4 optimizer steps of 64 sequences on it, Adam at a constant rate, gradient norm clipped at 1, no KL, no
evaluation. Neither has an end token, so every response has the same length in both. Tokens are prompt and response of
the trained sequences, without padding. The two processes take turns (one waits, idle, while the other works); the
first rollouts of each are warm-up and in no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, Row, rate_row, save_rows, say, table
from benchmarks.peers.environment import peers_python
from benchmarks.turns import Worker, take_turns

PEER = "TRL GRPOTrainer"
PHASES = {"loop": "whole loop", "training": "training step", "generation": "generation",
          "scoring": "old log-probs, rewards"}  # fmt: skip
TARGETS = {"loop": 1.0}


def write_prompts(file: Path, count: int = 512) -> None:
    """Additions of numbers of up to three digits, 4 to 8 character tokens each."""
    draw = random.Random(0)
    lines = [json.dumps({"prompt": f"{draw.randrange(1000)}+{draw.randrange(1000)}="}) for _ in range(count)]
    file.write_text("\n".join(lines) + "\n")


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The two programs with the same settings."""
    settings = {
        "--model": folder / "model", "--prompts": folder / "prompts.jsonl", "--rollouts": args.rollouts,
        "--samples": 8, "--prompts-per-rollout": 32, "--mini-batches": 4, "--warmup-rollouts": 3,
        "--max-response-length": args.response_length, "--learning-rate": 1e-4, "--seed": 0,
    }  # fmt: skip
    shared = [str(part) for pair in settings.items() for part in pair] + ["--fixed-length"]
    here = ROOT / "benchmarks"
    return {
        "megatron-gspo": [sys.executable, str(here / "our_loop.py"), *shared, "--old-log-probs", args.old_log_probs],
        PEER: [args.trl_python or peers_python(), str(here / "peers" / "trl_loop.py"), *shared, "--paced"],
    }


def rows_of(ours: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Tokens per second by phase from the reports of the turns."""

    def rates(reports: Sequence[Mapping[str, Any]], phase: str) -> list[dict[str, float]]:
        return [report[phase] | {"amount": report["tokens"]} for report in reports]

    return [
        rate_row("loop", name, rates(ours, phase), rates(peer, phase), unit="tokens/s", peer_name=PEER,
                 target=TARGETS.get(phase))
        for phase, name in PHASES.items()
    ]  # fmt: skip


def check_equal_work(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if the two sides did different amounts of work in a turn."""
    for key in ("steps", "response_tokens"):
        if ours[key] != peer[key]:
            raise ValueError(f"{key}: ours did {ours[key]}, {PEER} {peer[key]}; the settings of the two must agree")


def peer_versions(python: str) -> dict[str, str]:
    """What TRL's environment holds."""
    names = ("trl", "torch", "transformers")
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Rows, and both sides' reports of every turn with TRL's versions."""
    from megatron_gspo.tools.make_tiny_model import write_tiny_model

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_tiny_model(folder / "model")
        write_prompts(folder / "prompts.jsonl")
        lines = commands(args, folder)
        say(f"whole loop against TRL: {count:,} parameters, {args.turns} turns of {args.rollouts} rollouts")
        workers = [Worker(side, command, limit=args.limit) for side, command in lines.items()]
        with workers[0], workers[1]:
            reports = take_turns(workers, args.turns)
    for ours, peer in zip(*reports, strict=True):
        check_equal_work(ours, peer)
    said = {side: re.sub(re.escape(name), "FOLDER", " ".join(line)) for side, line in lines.items()}
    turns = dict(zip(lines, reports, strict=True))
    return rows_of(*reports), {"peer_versions": peer_versions(lines[PEER][0]), "commands": said, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 turns instead of --turns")
    parser.add_argument("--turns", type=int, default=9, help="segments of each side (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=2, help="rollouts a segment (default: %(default)s)")
    parser.add_argument("--response-length", type=int, default=24, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--old-log-probs", choices=("recompute", "rollout"), default="recompute",
        help="ours: recompute does the pass that TRL does too, rollout takes the engine's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL; without it .venv-peers is made")
    parser.add_argument("--limit", type=float, default=180, help="most seconds of a segment (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    args.turns = min(args.turns, 3) if args.quick else args.turns
    rows, details = measure(args)
    print(table(rows))
    if args.json:
        save_rows(args.json, rows, **details)


if __name__ == "__main__":
    main()
