"""Tokens per second against TRL's GRPOTrainer at sequence level: the training step and the whole
loop.

Both run in one process each, on one core, from the same Hugging Face directory and prompts: 32
prompts x 8 responses a rollout, 4 optimizer steps of 64 sequences on it, Adam at a constant rate,
gradient norm clipped at 1, no KL, no evaluation. Tokens are prompt and response of the trained
sequences, without padding. The two processes take turns (one waits, idle, while the other works);
the first rollouts of each are warm-up and in no figure.

Two kinds of responses. *sampled*: each ends where the policy samples the end token, which this
random model does once in about 100 tokens: geometric lengths, cut at the limit, so the longest of a
rollout is about four times the mean, as in training on real tasks. *equal*: neither side has an end
token and every response is as long as the limit, so neither padding nor rows that end early matter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, Row, rate_row, save_rows, say, table, versions_in
from benchmarks.peers.environment import peers_python
from benchmarks.turns import Worker, take_turns

PEER = "TRL GRPOTrainer"
PHASES = {
    "loop": "whole loop",
    "training": "training step",
    "generation": "generation",
    "scoring": "old log-probs, rewards",
}
LENGTHS = {"sampled": 384, "equal": 24}  # and the most tokens of a response
WARMUP = {"sampled": 1, "equal": 3}  # rollouts
LIMIT = 180.0  # seconds of a segment
PROMPTS = 512


def write_prompts(file: Path) -> None:
    """Additions of numbers of up to three digits, 4 to 8 character tokens each."""
    draw = random.Random(0)
    lines = [
        json.dumps({"prompt": f"{draw.randrange(1000)}+{draw.randrange(1000)}="})
        for _ in range(PROMPTS)
    ]
    file.write_text("\n".join(lines) + "\n")


def commands(lengths: str, args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The two programs with the same settings; `lengths` is a key of LENGTHS."""
    settings = {
        "--model": folder / "model",
        "--prompts": folder / "prompts.jsonl",
        "--seed": 0,
        "--learning-rate": 1e-4,
        "--rollouts": 2 if lengths == "equal" else 1,
        "--warmup-rollouts": WARMUP[lengths],
        "--samples": 8,
        "--prompts-per-rollout": 32,
        "--mini-batches": 4,
        "--max-response-length": LENGTHS[lengths],
    }
    shared = [str(word) for pair in settings.items() for word in pair]
    shared += ["--fixed-length"] if lengths == "equal" else []
    here = ROOT / "benchmarks"
    return {
        "megatron-gspo": [sys.executable, str(here / "our_loop.py"), *shared],
        PEER: [args.peers_python, str(here / "peers" / "trl_loop.py"), *shared],
    }


def rows_of(
    lengths: str, ours: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """Tokens per second by phase from the reports of the turns."""

    def rates(reports: Sequence[Mapping[str, Any]], phase: str) -> list[dict[str, float]]:
        return [report[phase] | {"amount": report["tokens"]} for report in reports]

    return [
        rate_row(
            "loop_vs_trl",
            f"{name}, {lengths} lengths",
            rates(ours, phase),
            rates(peer, phase),
            unit="tokens/s",
            peer_name=PEER,
        )
        for phase, name in PHASES.items()
    ]


def check_equal_work(
    lengths: str, ours: Sequence[Mapping[str, Any]], peer: Sequence[Mapping[str, Any]]
) -> None:
    """Raises ``ValueError`` if the two sides did different amounts of work: of steps, or of
    response tokens, which sampled lengths give in the mean only (within 15 % over all turns)."""
    for key in ("steps", "response_tokens"):
        pairs = [
            (our_count[key], peer_count[key])
            for our_count, peer_count in zip(ours, peer, strict=True)
        ]
        if lengths == "sampled" and key == "response_tokens":
            total = [sum(side) for side in zip(*pairs, strict=True)]
            pairs = [] if abs(total[0] / total[1] - 1.0) <= 0.15 else [(total[0], total[1])]
        for our_count, peer_count in pairs:
            if our_count != peer_count:
                raise ValueError(
                    f"{key}: ours did {our_count}, {PEER} {peer_count}; the settings of the two must agree"
                )


def measure_lengths(lengths: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Rows for one kind of responses."""
    say(f"whole loop against TRL: {lengths} lengths up to {LENGTHS[lengths]}, {args.turns} turns")
    ours, peer = (
        Worker(side, command, limit=LIMIT)
        for side, command in commands(lengths, args, folder).items()
    )
    with ours, peer:
        reports = take_turns([ours, peer], args.turns)
    check_equal_work(lengths, *reports)
    return rows_of(lengths, *reports)


def measure(args: argparse.Namespace) -> list[Row]:
    """All rows."""
    from megatron_gspo.tools.make_tiny_model import write_tiny_model

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    args.peers_python = args.peers_python or peers_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model")
        write_prompts(folder / "prompts.jsonl")
        return [row for lengths in LENGTHS for row in measure_lengths(lengths, args, folder)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 turns instead of --turns")
    parser.add_argument(
        "--turns", type=int, default=3, help="segments of each side (default: %(default)s)"
    )
    parser.add_argument(
        "--peers-python", help="interpreter with the peers; without it .venv-peers is made"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    args.turns = min(args.turns, 3) if args.quick else args.turns
    rows = measure(args)
    print(table(rows))
    if args.json:
        save_rows(
            args.json,
            rows,
            peer_versions=versions_in(args.peers_python, ("trl", "torch", "transformers")),
        )


if __name__ == "__main__":
    main()
