"""Responses are scored by the real verifiers, kept, and summarised; the responses themselves
are scripted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from rich.progress import Progress

from megatron_gspo.config import Config, DataConfig, SamplingParams
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.evaluation import evaluation_seed
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.tools.evaluate.response_file import ResponseFile
from megatron_gspo.tools.evaluate.run_tasks import answer_task
from megatron_gspo.tools.evaluate.task_files import load_task
from megatron_gspo.tools.evaluate.task_scores import score_task
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.tools.evaluate.public_files import (
    AIME,
    CODEFORCES,
    DOUBLES,
    DOUBLES_CALLED,
    LIVECODEBENCH,
    PRINTS_TWO,
    write_jsonl,
)

DATA = DataConfig(prompts="unused", verifier_timeout=60.0, code=CodeConfig(time_limit=2.0))


@dataclass
class Scripted:
    """A `ResponseEngine` that gives texts by prompt index, one prompt at a time."""

    texts: dict[int, list[str]]
    seed: int | None = None

    def groups(
        self,
        prompts: Sequence[Prompt],
        done: Collection[int],
        sampling: SamplingParams,
        *,
        seed: int,
    ) -> Iterator[list[list[Sample]]]:
        self.seed = seed
        for prompt in prompts:
            if prompt.index not in done:
                yield [
                    [
                        self._sample(prompt, i, text)
                        for i, text in enumerate(self.texts[prompt.index])
                    ]
                ]

    def _sample(self, prompt: Prompt, number: int, text: str) -> Sample:
        tokens = np.append(prompt.token_ids, 1)
        return Sample(
            prompt.index, number, tokens, prompt.length, np.ones(1, bool), None, "stop", text
        )


def config(n, **sections):
    plain = {
        "run_dir": "unused",
        "model": {"path": "unused"},
        "data": {"prompts": "unused"},
        "rollout": {"rollout_batch_size": 1},
        "training": {"steps": 1, "global_batch_size": 1},
        "evaluation": {"n_samples": n},
    }
    return Config.from_dict({**plain, **sections})


def answered(tmp_path, rows, texts, data=DATA, given=()):
    task = load_task(write_jsonl(tmp_path / "task.jsonl", rows), character_tokenizer(), data, given)
    n = len(texts[0])
    engine = Scripted(texts)
    with ResponseFile(tmp_path / "responses.jsonl", {}, n) as kept:
        answer_task(engine, task, kept, config(n), Progress(disable=True), "model: task")
    return task, kept, engine


def test_livecodebench(tmp_path):
    texts = {
        0: [DOUBLES, PRINTS_TWO],
        1: [DOUBLES, PRINTS_TWO],
        2: [DOUBLES, DOUBLES_CALLED],
        3: ["no", "idea"],
    }
    task, kept, _ = answered(tmp_path, LIVECODEBENCH, texts)
    scores = score_task(task, "model", None, kept.records)
    # PRINTS_TWO passes the visible test of the second problem and not the hidden one
    assert [[record["reward"] for record in kept.records[i]] for i in range(4)] == [
        [1, 0],
        [1, 0],
        [0, 1],
        [0, 0],
    ]
    assert (
        scores.pass_at_k[1].mean == 3 / 8
        and scores.pass_at_k[2].mean == 3 / 4
        and scores.failures == 0
    )


def test_codeforces(tmp_path):
    task, kept, _ = answered(
        tmp_path, CODEFORCES, {0: [DOUBLES], 1: [DOUBLES], 2: [PRINTS_TWO], 3: [DOUBLES]}
    )
    scores = score_task(task, "model", None, kept.records)
    assert scores.accuracy.mean == 3 / 4
    assert scores.left_out["needs a checker"] == 1


def test_aime(tmp_path):
    texts = {0: ["It is \\boxed{25}.", "\\boxed{26}", "I give up", "$25$"], 1: ["\\boxed{204}"] * 4}
    task, kept, engine = answered(tmp_path, AIME, texts)
    scores = score_task(task, "model", None, kept.records)
    assert (scores.accuracy.mean, scores.samples) == ((0.5 + 1) / 2, 4)  # mean@4; "025" is 25
    assert scores.pass_at_k[2].mean == pytest.approx((5 / 6 + 1) / 2)
    assert engine.seed == evaluation_seed(1234)  # the training loop's, with its default seed


def test_failures_of_the_verifier_are_kept_and_all_of_them_are_an_error(tmp_path):
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def score(response, prompt):\n    return float(response)\n")
    data = replace(DATA, verifier=f"{verifier}:score")
    given = {"data.verifier"}
    task, kept, _ = answered(tmp_path, AIME, {0: ["1", "x"], 1: ["0.5", "0"]}, data, given)
    assert kept.records[0][1]["reward"] is None
    assert kept.records[0][1]["metadata"]["verifier_failure"].startswith("error: ")
    assert score_task(task, "model", None, kept.records).failures == 1
    (tmp_path / "responses.jsonl").unlink()
    with pytest.raises(
        VerifierError, match="failed on all 2 responses of a batch .the first: .*float"
    ):
        answered(tmp_path, AIME, {0: ["a", "b"], 1: ["c", "d"]}, data, given)
