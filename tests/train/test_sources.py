"""A run on several sources of prompts: their shares, their rewards, and a resume in the middle."""

from __future__ import annotations

import json

import torch

from tests.support.prompt_rows import write_jsonl
from tests.support.training_runs import WORD, base_config, exported, launch, records, tiny_model


def test_a_run_on_two_sources_and_its_resume(tmp_path):
    write_jsonl(
        tmp_path / "words.jsonl",
        [{"question": f"{WORD} {word}", "solution": word[::-1]} for word in ("sun", "sea", "sky")],
    )
    spelling = {"name": "spelling", "task": {"name": "spell_backward", "size": 50, "eval_size": 4}}
    words = {
        "name": "words",
        "prompts": str(tmp_path / "words.jsonl"),
        "eval_prompts": str(tmp_path / "words.jsonl"),
        "prompt_key": "question",
        "answer_key": "solution",
        "verifier": "exact_match",
        "verifier_options": {},
    }
    config = base_config(
        tiny_model(tmp_path / "model"),
        tmp_path / "whole",
        data={"task": None, "sources": [{**spelling, "weight": 3}, words]},
        training={"steps": 4},
        evaluation={"eval_interval": 2},
        checkpoint={"save_interval": 2},
        tracking={"samples_per_step": 16},
    )
    done = launch(config, 2)
    assert "spelling spell_backward, words" in done.log
    steps = records(tmp_path / "whole")
    for step in steps[1:]:
        assert step["sources/spelling/prompts"] == 3.0 and step["sources/words/prompts"] == 1.0
        assert step["sources/spelling/reward"] > 0.0 and step["sources/words/reward"] == 0.0
    assert {"eval/accuracy/spelling", "eval/accuracy/words"} <= set(steps[-1])
    samples = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((tmp_path / "whole" / "samples").glob("*.jsonl"))
    ]
    of_words = [
        {sample["answer"] for sample in of_step if sample["source"] == "words"}
        for of_step in samples
    ]
    assert [len(answers) for answers in of_words] == [1] * 4, "one prompt of words in each step"
    assert set.union(*of_words[:3]) == {"nus", "aes", "yks"}, "the first pass over the three words"

    again = {**config, "run_dir": str(tmp_path / "again")}
    launch(again, 2, "training.steps=2")
    launch(again, 2)
    ours = exported(tmp_path / "again")
    theirs = exported(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert records(tmp_path / "again") == records(tmp_path / "whole")
