"""Plots of the files in ratios/: token ratios beside sequence ratios, the clip band, and one response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gspo.given_names import RATIOS
from megatron_gspo.tools.compare.run_records import Run

Arrays = Mapping[str, np.ndarray]


def ratio_files(run: Run) -> list[Path]:
    """The run's ratio files, oldest first."""
    return list(RATIOS.entries(run.run_dir / "ratios").values())


def load_ratios(file: Path) -> dict[str, np.ndarray]:
    """The arrays of one file; without unpickling anything. Raises ValueError for a file that isn't whole."""
    with np.load(file, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def sequence_log_ratios(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Length-normalised log-ratio `[n]` float64 of each sequence that is there, and its number `[n]`.

    The mean over a sequence's trained tokens: GSPO equation 7.
    """
    numbers, place = np.unique(arrays["sequence"], return_inverse=True)
    total = np.bincount(place, weights=arrays["log_ratio"].astype(np.float64), minlength=len(numbers))
    return total / np.bincount(place, minlength=len(numbers)), numbers


def clip_band(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """(epsilon_low, epsilon_high) of a resolved training config; nulls are the preset's. None where it has no clip."""
    algorithm = config.get("algorithm", {})
    low, high = algorithm.get("epsilon_low"), algorithm.get("epsilon_high")
    if low is None or high is None:
        from megatron_gspo.algorithms import preset  # torch, which a config without nulls needn't wait for

        chosen = preset(algorithm.get("name", "gspo"))
        low, high = chosen.epsilon_low if low is None else low, chosen.epsilon_high if high is None else high
    return None if low is None or high is None else (float(low), float(high))


def cut_share(log_ratio: np.ndarray, advantage: np.ndarray, band: tuple[float, float]) -> float:
    """Share of ratios whose gradient a clip range would cut: outside it on the side that the advantage pushes to."""
    if not len(log_ratio):
        return 0.0
    ratio = np.exp(log_ratio.astype(np.float64))
    cut = ((advantage > 0) & (ratio > 1 + band[1])) | ((advantage < 0) & (ratio < 1 - band[0]))
    return float(cut.mean())


@dataclass(frozen=True)
class Spread:
    """Ratios of the last recorded mini-batch of one variant's runs, pooled.

    token, sequence: log-ratios. token_flipped, token_same: mean |log-ratio| of tokens with and without an expert flip,
    flipped: share of tokens with one; of the tokens that were compared, None where there are none.
    """

    variant: str
    step: int
    band: tuple[float, float] | None
    token: np.ndarray
    sequence: np.ndarray
    flipped: float | None
    token_flipped: float | None
    token_same: float | None


def spread_of(variant: str, runs: Sequence[Run]) -> Spread | None:
    """Of the runs that recorded ratios; None where none did."""
    tokens, sequences, flips, step = [], [], [], 0
    for run in runs:
        arrays = last_ratios(run)
        if arrays is None:
            continue
        step = max(step, _step(ratio_files(run)[-1]))
        tokens.append(arrays["log_ratio"].astype(np.float64))
        sequences.append(sequence_log_ratios(arrays)[0])
        flips.append(arrays["flipped"] if "flipped" in arrays else np.full(len(tokens[-1]), -1))
    if not tokens:
        return None
    token, flipped = np.concatenate(tokens), None
    moved: list[float | None] = [None, None]
    flag = np.concatenate(flips)
    if (flag >= 0).any():
        flipped = float(flag[flag >= 0].mean())
        moved = [float(np.abs(token[flag == value]).mean()) if (flag == value).any() else None for value in (1, 0)]
    return Spread(variant, step, clip_band(runs[0].config), token, np.concatenate(sequences), flipped, *moved)


def last_ratios(run: Run) -> dict[str, np.ndarray] | None:
    """The run's newest ratio file that can be read, None without one."""
    for file in reversed(ratio_files(run)):
        try:
            arrays = load_ratios(file)
        except (OSError, ValueError):
            continue
        if len(arrays.get("log_ratio", ())):
            return arrays
    return None


@dataclass(frozen=True)
class Token:
    """One token of the response that is shown."""

    text: str
    ratio: float
    cut: bool
    flipped: bool | None


@dataclass(frozen=True)
class Response:
    """One response under both weightings: each token's GRPO weight, and GSPO's one ratio.

    grpo_band, gspo_band: the clip ranges that `cut` and `sequence_cut` go by.
    """

    run: str
    step: int
    sequence: int
    advantage: float
    tokens: list[Token]
    sequence_ratio: float
    sequence_cut: bool
    grpo_band: tuple[float, float]
    gspo_band: tuple[float, float]


def pick_response(run: Run, grpo_band: tuple[float, float], gspo_band: tuple[float, float]) -> Response | None:
    """Of the run's last recorded mini-batch the response whose token log-ratios spread the most.

    Among responses with a non-zero advantage where there are any, and of at least four tokens where there are any:
    a single token has no spread. None where no ratios were recorded.
    """
    arrays = last_ratios(run)
    if arrays is None:
        return None
    numbers = np.unique(arrays["sequence"])
    chosen = max(numbers, key=lambda number: _interest(arrays, int(number)))
    rows = arrays["sequence"] == chosen
    logs = arrays["log_ratio"][rows].astype(np.float64)
    advantage = float(arrays["advantage"][rows][0])
    flips = arrays["flipped"][rows].tolist() if "flipped" in arrays else [-1] * len(logs)
    flipped = [None if flip < 0 else bool(flip) for flip in flips]
    tokens = [
        Token(str(text), math.exp(value), _is_cut(math.exp(value), advantage, grpo_band), flip)
        for text, value, flip in zip(arrays["token_text"][rows], logs, flipped, strict=True)
    ]
    ratio = math.exp(float(logs.mean()))
    return Response(
        run.name, _step(ratio_files(run)[-1]), int(chosen), advantage, tokens, ratio,
        _is_cut(ratio, advantage, gspo_band), grpo_band, gspo_band,
    )  # fmt: skip


def _interest(arrays: Arrays, number: int) -> tuple[bool, bool, float]:
    rows = arrays["sequence"] == number
    logs = arrays["log_ratio"][rows]
    return bool(arrays["advantage"][rows][0] != 0), len(logs) >= 4, float(np.std(logs))


def _is_cut(ratio: float, advantage: float, band: tuple[float, float]) -> bool:
    return (advantage > 0 and ratio > 1 + band[1]) or (advantage < 0 and ratio < 1 - band[0])


def _step(file: Path) -> int:
    step = RATIOS.step(file.name)
    assert step is not None
    return step
