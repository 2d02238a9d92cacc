"""Tasks: prompt files with their verifier."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_gspo.config import ConfigError, DataConfig
from megatron_gspo.config.data_checks import check_data
from megatron_gspo.data.prompt_files import HELD_OUT, PromptError, read_rows, split_notes
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompt_rows import has_field
from megatron_gspo.data.prompts import Tokenizer, build_prompts
from megatron_gspo.data.sample import Prompt
from megatron_gspo.tools.evaluate.layouts import Layout, LeftOut, layout_of

Window = tuple[datetime | None, datetime | None]
_VERIFIERS = ("data.verifier", "evaluation.verifier")


@dataclass(frozen=True)
class Task:
    """Prompts of one file, and how their responses are scored.

    name: of its results. data: format and verifier. left_out: rows that are not evaluated, by
    reason.
    """

    name: str
    data: DataConfig
    prompts: tuple[Prompt, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    layout: str = "plain"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that a response and its score depend on besides model and
        sampling.
        """
        digest = hashlib.sha256(
            json.dumps([self.data.resolved_verifier, self.data.resolved_verifier_options]).encode()
        )
        for prompt in self.prompts:
            content = [prompt.index, prompt.token_ids.tolist(), prompt.answer, prompt.metadata]
            digest.update(json.dumps(content, sort_keys=True).encode())
        return digest.hexdigest()


def task_names(files: Sequence[Path]) -> list[str]:
    """The names of the files' tasks: without folder and suffix. Raises ``PromptError`` for two
    of one name.
    """
    names = [file.stem for file in files]
    if doubled := [name for name, count in Counter(names).items() if count > 1]:
        raise PromptError(
            f"--tasks: two files have the name {doubled[0]!r}, which names their results;"
            " rename one"
        )
    return names


def load_task(
    file: Path,
    tokenizer: Tokenizer,
    data: DataConfig,
    given: Collection[str] = (),
    window: Window = (None, None),
    limit: int | None = None,
    *,
    scored_by_agents: bool = False,
) -> Task:
    """Read a task file (kinds: ``read_rows``); of a data set with splits, the held-out one.

    data: format and verifier. given: the keys that the user has set for this evaluation,
    ``data.verifier`` for example; they win over those of the file's layout. window: first and last
    time of the problems' dates; a date is its midnight. limit: most prompts. scored_by_agents: see
    ``check_data``.

    A prompt that is too long is an error unless ``data.overlong_prompts`` is given: dropped prompts
    would change the accuracy. Raises ``PromptError`` or ``ConfigError``.
    """
    rows = list(read_rows(file, split=HELD_OUT))
    fields = set(rows[0][1]) if rows else set()
    if rows and has_field(rows[0][1], data.prompt_key):
        fields.add(data.prompt_key)  # also one inside of another field
    layout = layout_of(fields, data.prompt_key)
    if layout.read is not None:
        data = replace(
            data, prompt_key="prompt", answer_key="answer" if layout.has_answer else None
        )
    if layout.verifier is not None and not any(key in given for key in _VERIFIERS):
        data = replace(data, verifier=layout.verifier, verifier_options={})
    if "data.overlong_prompts" not in given:
        data = replace(data, overlong_prompts="error")
    data = replace(data, task=None, sources=(), prompts=str(file), eval_prompts=None)
    check_data(data, scored_by_agents=scored_by_agents)
    left_out: Counter[str] = Counter()
    kept = list(_read(rows, layout, data.code.language, window, left_out))
    if not kept and left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise PromptError(
            f"{file}: all rows are left out ({reasons}); give others or a wider window"
        )
    notes = split_notes(file, split=HELD_OUT)
    prompts = build_prompts(kept[:limit], tokenizer, data, source=str(file), notes=notes)
    for note in prompts.notes:
        print(f"note: {note}", file=sys.stderr)
    if prompts.dropped:
        left_out["too long"] += prompts.dropped
    return Task(file.stem, data, tuple(prompts.prompts), dict(left_out), layout.name)


def _read(
    rows: list[tuple[str, dict[str, Any]]],
    layout: Layout,
    language: str,
    window: Window,
    left_out: Counter[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    first, last = window
    for location, row in rows:
        if missing := [
            field for field in layout.fields if field not in row and layout.read is not None
        ]:
            raise PromptError(
                f"{location}: key {missing[0]!r} is missing, which the rows before it have;"
                " correct it"
            )
        if first is not None or last is not None:
            date = _date(layout, location, row)
            if (first is not None and date < first) or (last is not None and date > last):
                left_out["outside of the dates"] += 1
                continue
        try:
            yield location, row if layout.read is None else layout.read(row, language)
        except LeftOut as reason:
            left_out[str(reason)] += 1


def _date(layout: Layout, location: str, row: dict[str, Any]) -> datetime:
    try:
        date = layout.date(row)
    except ValueError as error:
        raise PromptError(f"{location}: its date can't be read ({error}); correct it") from None
    if date is None:
        raise PromptError(
            f"{location}: has no date (contest_date); leave out --from and --to, or the row"
        )
    return date


def held_out_tasks(prompts: Sequence[Prompt], data: DataConfig) -> tuple[Task, ...]:
    """A run's own held-out prompts, a task for each source of prompts that has some. Raises
    ``ConfigError`` without any.
    """
    if not prompts:
        problem = "the run has no held-out prompts"
        raise ConfigError("data.eval_prompts", None, problem, "give --tasks FILE")
    if not isinstance(prompts, MixedPrompts):
        return (Task("held_out", data, tuple(prompts)),)
    return tuple(
        Task(name, data.by_source[name], tuple(source)) for name, source in prompts.sources.items()
    )
