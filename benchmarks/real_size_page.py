"""The tables of docs/scaling.md: what one rank's host does by the plan, and what `real_size.py` measured.

`write_page.py` writes them between comments:

    <!-- one-rank -->
    <!-- /one-rank -->
    <!-- real-size -->
    <!-- /real-size -->

Measured are the newest rows of the committed results, each of which may be of some of the measurements alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, markdown, number

# of results, after the date
NAMES, BEFORE = ("real-size", "data-plane", "limited-disk", "micro-batch-inputs"), "before"
BLOCK = re.compile(r"^<!-- (one-rank|real-size) -->\n(?:.*\n)*?<!-- /\1 -->$", re.MULTILINE)
Rows = Mapping[str, Mapping[str, Any]]  # by `what`

# The options of `megatron-gspo plan` that every column of the first table has, and those of each.
OPTIONS = ("--gpu h100 --response-length 8192 --rollout-batch-size 512 --n-samples 16 --global-batch-size 2048 "
           "--recompute full --max-tokens 9216")  # fmt: skip
_SMALL, _LARGE = ("Qwen3-30B-A3B", "TP2 EP8", 2), ("Qwen3-235B-A22B", "TP2 PP8+2 VP2 EP8", 8)
COLUMNS = {  # heading -> model, layout, GPUs of a server, GPUs
    "30B, 16 GPUs": (*_SMALL, 16), "512": (*_SMALL, 512), "4,096": (*_SMALL, 4096),
    "235B, 512 GPUs": (*_LARGE, 512), "4,096 ": (*_LARGE, 4096),
}  # fmt: skip
_MIB, _GIB = 2**20, 2**30
_HELD = (  # figure of `HostCosts`, or of the step's time; unit of the table; what it is
    ("numbers", _MIB, "holds: numbers of all samples, MiB"),
    ("samples", _GIB, "holds: its replica's samples, GiB"),
    ("checkpoint", _GIB, "holds: buffers of a checkpoint, GiB"),
    ("answers", _GIB, "receives as a client: answers, GiB"),
    ("receive", 1, "receives and checks them, while others are generated, s"),
    ("prepare", 1, "moves, packs, measures, s"),
    ("source", _GIB, "sends as the largest source: weights, GiB"),
    ("sync", 1, "waits for new weights, any number of servers, s"),
)


@dataclass(frozen=True)
class Line:
    """A line of the second table. rows: patterns of `what` at any size, which may fit several rows of one unit."""

    what: str
    rows: tuple[str, ...]


_WITH, _WITHOUT = "*tokens with routes over 8 ranks: ", "*tokens without routes over 8 ranks: "

LINES = (
    Line("2,048 responses of 4,096 tokens over 8 ranks, a core of one rank per million tokens: with routes; without",
         (f"{_WITH}*per million tokens", f"{_WITHOUT}*per million tokens")),
    Line("the same against 2 ranks, whose share is as large",
         (f"{_WITH}*against 2 ranks", f"{_WITHOUT}*against 2 ranks")),
    Line("host memory of a rank beyond 200 MiB, with routes", (f"{_WITH}host memory*",)),
    Line("two replicas of TP 2 with the same share and routes: a core of one rank per million tokens",
         ("replicas of TP 2*per million tokens",)),
    Line("the same: host memory of a rank beyond 200 MiB", ("replicas of TP 2*host memory*",)),
    Line("a response of 32,768 tokens with routes: checked and packed", ("a response of 32,768*: checked and packed",)),
    Line("the same: peak", ("a response of 32,768*, peak",)),
    Line("the same: kept", ("a response of 32,768*: kept",)),
    Line("a micro-batch of one sequence of 32,768 tokens: the host's work, routes left out",
         ("a micro-batch of one sequence*, on the host",)),
    Line("the same: peak", ("a micro-batch of one sequence*, on the host: peak",)),
    Line("weights to 8 servers, trainer's link of 100 Mbit/s: bytes that leave it",
         ("* of weights to 8 servers*bytes leaving the trainer",)),
    Line("the same: time", ("* of weights to 8 servers*: time",)),
    Line("PP 2 x EP 2 sources to 2 servers: time", ("* of weights to 2 servers*: time from*",)),
    Line("checkpoint of 1, 2, 4 ranks with 1.1 GiB each: memory of a save", ("checkpoint save: host memory*",)),
    Line("memory of a load", ("checkpoint load: host memory*",)),
    Line("a save: the loop waits", ("checkpoint save: the loop waits*",)),
    Line("saves", ("checkpoint save, *",)),
    Line("loads", ("checkpoint load, *",)),
    Line("saves to a disk of 400 MB/s", ("checkpoint save to a disk*",)),
    Line("loads from it", ("checkpoint load from a disk*",)),
    Line("two replicas of a node load weights that are not in its memory: bytes that the disk reads",
         ("two replicas of a node*",)),
    Line("20,000 prompts: start of each process but the first of a node", ("* prompts: start*",)),
    Line("rehearsed worlds of 512 and 4,096: largest collective over the world in a step, without gradients and "
         "parameters", ("rehearsed world of 512*", "rehearsed world of 4,096*")),
    Line("process groups of a rank in both", ("process groups of a rank*",)),
)  # fmt: skip


def newest_rows(folder: Path = RESULTS) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The rows of all committed results by `what`, the newest of each, and the results' names that have one."""
    rows: dict[str, dict[str, Any]] = {}
    for file in _files(folder, *NAMES):
        rows |= {row["what"]: row | {"file": file.name} for row in json.loads(file.read_text())["rows"]}
    for file in _files(folder, BEFORE)[-1:]:
        for old in json.loads(file.read_text())["rows"]:
            for what in filter(lambda what, old=old: fnmatchcase(what, old["what"]), rows):
                rows[what]["before"] = old["before"]
    return rows, [file.name for file in _files(folder, *NAMES, BEFORE)]


def _files(folder: Path, *names: str) -> list[Path]:
    """The results of these names, by date."""
    return sorted(file for name in names for file in folder.glob(f"20*-{name}.json"))


def fitted_rates(rows: Rows) -> dict[str, float]:
    """The plan's rates of a host by name: per token of a batch without routes, and per expert id what routes add."""
    parts = [next(row["parts"] for what, row in rows.items() if fnmatchcase(what, pattern))
             for pattern in LINES[0].rows]  # fmt: skip
    receives = [part["receive and check, s"] for part in parts]
    prepares = [sum(part.values()) - receive for part, receive in zip(parts, receives, strict=True)]
    ids = 48 * 8  # of a token
    return {
        "receive_us_token": receives[1], "receive_ns_id": 1e3 * (receives[0] - receives[1]) / ids,
        "prepare_us_token": prepares[1], "prepare_ns_id": 1e3 * (prepares[0] - prepares[1]) / ids,
    }  # fmt: skip


def one_rank() -> str:
    """The first table."""
    columns = {heading: _of_host(*given) for heading, given in COLUMNS.items()}
    cells = [[what, *(number(found[name] / unit) for found in columns.values())] for name, unit, what in _HELD]
    return markdown(["of one rank", *(heading.strip() for heading in columns)], cells)


def _of_host(model: str, layout: str, engine_tensor: int, gpus: int) -> dict[str, float]:
    """The host's costs of a plan, and seconds of ``sync``."""
    from megatron_gspo.tools.plan.__main__ import fixed_choice, inputs, load_model, parser
    from megatron_gspo.tools.plan.layout_search import search

    args = parser().parse_args([
        "--model", str(ROOT / "examples" / "qwen3_moe" / "models" / model), *OPTIONS.split(), "--layout", layout,
        "--engine-tensor", str(engine_tensor), "--gpus", str(gpus),
    ])  # fmt: skip
    hf, shape = load_model(args.model)
    work, cluster, assume = inputs(args)
    plan = search(hf, shape, work, cluster, assume, fixed_choice(args, hf, work)).plans[0]
    return dataclasses.asdict(plan.host) | {"sync": plan.time.sync}


def real_size(rows: Rows, files: Sequence[str]) -> str:
    """The second table. A line that no row fits is left out: its measurement is newer than the results.

    Raises ``ValueError`` for rows of different units in one line.
    """
    cells = []
    for line in LINES:
        if found := [row for pattern in line.rows for what, row in rows.items() if fnmatchcase(what, pattern)]:
            cells.append(_cells(line, found))
    links = ",\n".join(f"[{name.removesuffix('.json')}](../benchmarks/results/{name})" for name in files)
    return f"{markdown(('what', 'ours', 'target', 'before'), cells)}\n\nResults:\n{links}."


def _cells(line: Line, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    units, targets = {row["unit"] for row in rows}, [f"{row['target']:.3g}" for row in rows]
    if len(units) > 1:
        raise ValueError(f"{line.what}: rows of {', '.join(sorted(units))}")
    target = "; ".join(targets if len(set(targets)) > 1 else targets[:1])
    if missed := [number(row["ours"]) for row in rows if not row["met"]]:
        target += f", **missed** by {', '.join(missed)}"
    before = [row.get("before") for row in rows]
    shown = "; ".join("-" if value is None else number(value) for value in before) if any(before) else ""
    return [line.what, f"{'; '.join(number(row['ours']) for row in rows)} {units.pop()}".strip(), target, shown]


def filled(text: str) -> str:
    """A page's text with its tables."""

    def block(found: re.Match[str]) -> str:
        table = one_rank() if found[1] == "one-rank" else real_size(*newest_rows())
        return f"<!-- {found[1]} -->\n\n{table}\n\n<!-- /{found[1]} -->"

    return BLOCK.sub(block, text)
