"""Evaluates models on tasks: responses are generated, scored, kept, and summarised."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_gspo.config import Config, SamplingParams
from megatron_gspo.config.agents_section import AgentsConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import printable
from megatron_gspo.loop.evaluation import evaluation_sampling, evaluation_seed
from megatron_gspo.loop.inputs import load_data, load_tokenizer
from megatron_gspo.loop.reward_scoring import failed_on_all, score_episodes
from megatron_gspo.rewards.sandbox.visible_files import refuse_visible_files, refuse_visible_run
from megatron_gspo.rewards.scorer import FAILURE, RewardScorer, scorer_of
from megatron_gspo.tools.evaluate.response_engines import ResponseEngine, open_engine
from megatron_gspo.tools.evaluate.response_file import ResponseFile
from megatron_gspo.tools.evaluate.targets import Target, hugging_face_folder
from megatron_gspo.tools.evaluate.task_files import (
    Task,
    Window,
    held_out_tasks,
    load_task,
    task_names,
)
from megatron_gspo.tools.evaluate.task_scores import (
    TaskScores,
    prompt_accuracy,
    reward_table,
    score_task,
)

# Folders of the output; the second while a checkpoint is evaluated.
RESPONSES = "responses"
CONVERTED = ".converted"


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated and how. output: folder of all results."""

    config: Config
    targets: tuple[Target, ...]
    tasks: tuple[Task, ...]
    output: Path


def with_model(config: Config, path: Path) -> Config:
    """The config with another `model.path`."""
    return replace(config, model=replace(config.model, path=str(path)))


def load_tasks(
    config: Config, files: Sequence[Path], given: set[str], window: Window
) -> tuple[Task, ...]:
    """The tasks of the files, else the run's own held-out prompts, tokenised for `model.path`.

    given: the config's keys that the user has set for this evaluation. Raises InputError.
    """
    tokenizer = load_tokenizer(config)
    limit = config.evaluation.max_prompts
    if not files:
        refuse_visible_run(config)
        _, held_out, _ = load_data(config, tokenizer)
        return held_out_tasks(held_out, config.evaluation_data)
    task_names(files)
    tasks = tuple(
        load_task(
            file,
            tokenizer,
            config.evaluation_data,
            given,
            window,
            limit,
            scored_by_agents=config.samples_are_runs,
        )
        for file in files
    )
    if any(task.data.resolved_verifier == "code" for task in tasks):
        refuse_visible_files(config.data.code, {"--tasks": files})
    return tasks


def run_evaluation(evaluation: Evaluation) -> list[TaskScores]:
    """Answer and score what is missing, then summarise everything: each task's models in the order
    of the targets.

    Raises the errors of engines, verifiers and files; every response so far is kept.
    """
    scores: list[TaskScores] = []
    first: dict[str, np.ndarray] = {}
    with _progress() as bar:
        for target in evaluation.targets:
            with ExitStack() as stack:
                kept = {
                    task.name: stack.enter_context(_open(evaluation, target, task))
                    for task in evaluation.tasks
                }
                _answer(evaluation, target, kept, bar)
                for task in evaluation.tasks:
                    records = kept[task.name].records
                    own = prompt_accuracy(
                        reward_table([records[prompt.index] for prompt in task.prompts])
                    )
                    ks = evaluation.config.evaluation.pass_at_k
                    scores.append(
                        score_task(
                            task, target.label, target.step, records, ks, first.get(task.name)
                        )
                    )
                    first.setdefault(task.name, own)
    return scores


def _open(evaluation: Evaluation, target: Target, task: Task) -> ResponseFile:
    config = evaluation.config
    sampling = sampling_of(evaluation.config)
    settings = {
        "weights": target.identity,
        "task": task.fingerprint,
        "sampling": asdict(sampling),
        "seed": config.seed,
        "engine": config.rollout.engine,
        "dtype": config.model.dtype,
        "special tokens": "kept" if task.data.keep_special_tokens else "removed",
    }
    if config.agents != AgentsConfig():
        settings["agents"] = asdict(config.agents)
    if config.rollout.environment is not None:
        names = ("environment", "environment_options", "max_turns", "max_turn_length")
        settings["environment"] = {name: getattr(config.rollout, name) for name in names}
    path = evaluation.output / RESPONSES / target.label / f"{task.name}.jsonl"
    return ResponseFile(path, settings, sampling.n_samples_per_prompt)


def sampling_of(config: Config) -> SamplingParams:
    """How responses are sampled: as in the training loop's evaluation."""
    section = evaluation_sampling(config)
    return SamplingParams(
        **{field.name: getattr(section, field.name) for field in fields(SamplingParams)}
    )


def _answer(
    evaluation: Evaluation, target: Target, kept: dict[str, ResponseFile], bar: Progress
) -> None:
    """Generate and score the responses that are missing; opens no engine if none is."""
    missing = [
        task for task in evaluation.tasks if len(kept[task.name].records) < len(task.prompts)
    ]
    if not missing:
        return
    scratch = evaluation.output / CONVERTED
    convert = bar.add_task(
        f"{target.label}: to Hugging Face", total=None, visible=target.is_checkpoint, note=""
    )

    def report(done: int, total: int) -> None:
        bar.update(convert, completed=done >> 20, total=total >> 20)

    folder = hugging_face_folder(target, scratch, processes=os.cpu_count() or 1, report=report)
    with folder as path:
        bar.remove_task(convert)
        config = with_model(evaluation.config, path)
        with open_engine(config, load_tokenizer(config), target.urls) as engine:
            for task in missing:
                answer_task(
                    engine, task, kept[task.name], config, bar, f"{target.label}: {task.name}"
                )


def answer_task(
    engine: ResponseEngine,
    task: Task,
    kept: ResponseFile,
    config: Config,
    bar: Progress,
    title: str,
) -> None:
    """Generate the responses that `kept` lacks, score them and add them to it as they are finished.

    Raises VerifierError if the verifier fails on all responses so far.
    """
    sampling = sampling_of(config)
    row = bar.add_task(title, total=len(task.prompts), completed=len(kept.records), note="")
    with _scoring(config, task) as scoring:
        if scoring.description is not None:
            line = printable(f"{title}: {scoring.description}")
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        n = sampling.n_samples_per_prompt
        seed = evaluation_seed(config.seed)
        total = reward_table(list(kept.records.values())).sum()
        for groups in engine.groups(task.prompts, set(kept.records), sampling, seed=seed):
            scored = scoring.score([sample for group in groups for sample in group])
            failures = [sample.metadata.get(FAILURE, "") for sample in scored]
            if not kept.records and all(failures):
                raise failed_on_all(scoring.name, len(scored), failures[0])
            kept.write([scored[i : i + n] for i in range(0, len(scored), n)])
            total += reward_table([kept.records[group[0].prompt_index] for group in groups]).sum()
            accuracy = total / (len(kept.records) * n)
            bar.update(row, completed=len(kept.records), note=f"accuracy {100 * accuracy:.1f} %")


class Scoring(Protocol):
    """Scores samples. name: of who does it, for messages. description: what it says of itself."""

    name: str
    description: str | None

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their rewards, or the reason of a failure in their metadata."""
        ...


@contextmanager
def _scoring(config: Config, task: Task) -> Iterator[Scoring]:
    """Who scores the samples of a task."""
    data = task.data
    if config.samples_are_runs:
        yield _PlayedScores(config.player, data.verifier_failure_reward)
        return
    scorer = scorer_of(data)
    with scorer:
        yield _VerifierScores(scorer, f"verifier {data.resolved_verifier!r}", task.prompts)


class _PlayedScores:
    """Runs of agents and episodes have been scored while they were played."""

    description: str | None = None

    def __init__(self, name: str, failure_reward: float | None) -> None:
        self.name = name
        self._failure_reward = failure_reward

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        scored, _ = score_episodes(samples, self._failure_reward)
        return scored


class _VerifierScores:
    """Responses are scored by a verifier."""

    def __init__(self, scorer: RewardScorer, name: str, prompts: Sequence[Prompt]) -> None:
        self.name = name
        self.description = scorer.description
        self._scorer = scorer
        self._prompts = {prompt.index: prompt for prompt in prompts}

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        requests = [(sample.text, self._prompts[sample.prompt_index]) for sample in samples]
        scores = self._scorer.score_texts(requests)
        return [
            _scored(*each)
            for each in zip(samples, scores.rewards.tolist(), scores.failures, strict=True)
        ]


def _scored(sample: Sample, reward: float, failure: str) -> Sample:
    failed = {FAILURE: failure} if failure else {}
    return replace(sample, reward=reward, metadata=sample.metadata | failed)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr for each model and task."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        yield bar
