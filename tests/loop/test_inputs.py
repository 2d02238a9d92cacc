"""A run's inputs: what is loaded, and what is refused with the key that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.data.prompts import PromptError
from megatron_gspo.loop.inputs import (
    check_prompts,
    check_weights,
    load_data,
    load_tokenizer,
    prompt_cache,
)
from megatron_gspo.loop.setup import prompt_source
from tests.support.prompt_rows import write_jsonl
from tests.support.training_runs import WORD, base_config, tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def config(model: Path, /, **sections: Any) -> Config:
    return Config.from_dict(base_config(str(model), model.parent / "run", **sections))


def test_the_checkpoint_is_complete(model: Path) -> None:
    assert check_weights(config(model)).num_layers == 2
    (file,) = model.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(
        ConfigError, match="^model.path = .*: cannot be trained: .*; give a complete safetensors"
    ):
        check_weights(config(model))
    file.unlink()
    assert check_weights(config(model, model={"init": "random"})).num_layers == 2, (
        "then it needs no weights"
    )


def test_the_tokenizer(model: Path) -> None:
    assert load_tokenizer(config(model)).eos_token_id is not None
    for file in model.glob("token*"):
        file.write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer can't be loaded"):
        load_tokenizer(config(model))
    for file in model.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer \(none of tokenizer.json"):
        load_tokenizer(config(model))


def test_prompts_of_files_and_of_a_task(model: Path) -> None:
    tokenizer = load_tokenizer(config(model))
    for name, words in (("train", ("sun", "moon" * 12, "star")), ("held_out", ("sky", "sea"))):
        rows = [{"prompt": f"{WORD} {word}", "answer": word[::-1]} for word in words]
        (model / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "task": None,
        "prompts": str(model / "train.jsonl"),
        "eval_prompts": str(model / "held_out.jsonl"),
    }
    train, held_out, dropped = load_data(config(model, data=files), tokenizer)
    assert [prompt.answer for prompt in train] == [
        "nus",
        "rats",
    ]
    assert dropped == 1, "the longest is dropped"
    assert [prompt.answer for prompt in held_out] == ["yks", "aes"]
    _, held_out, _ = load_data(config(model, data=files, evaluation={"max_prompts": 1}), tokenizer)
    assert [prompt.answer for prompt in held_out] == ["yks"]
    train, held_out, dropped = load_data(config(model), tokenizer)
    assert 190 < len(train) + dropped <= 200
    assert len(held_out) == 8, "questions that are held out are not trained on"
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}


def test_prompts_of_several_sources(model: Path) -> None:
    tokenizer = load_tokenizer(config(model))
    rows = [{"question": f"{WORD} {word}", "solution": word[::-1]} for word in ("sun", "moon" * 12)]
    write_jsonl(model / "words.jsonl", rows)
    words = {
        "name": "words",
        "prompts": str(model / "words.jsonl"),
        "prompt_key": "question",
        "answer_key": "solution",
    }
    task = {
        "name": "task",
        "task": {"name": "spell_backward", "size": 20, "eval_size": 3},
        "prompt_template": "{question} ",
        "weight": 3,
    }
    several = config(
        model,
        data={"task": None, "sources": [words, task]},
        evaluation={"max_prompts": 2},
    )
    train, held_out, dropped = load_data(several, tokenizer, prompt_cache(several))
    assert (train[0].answer, train[0].source, train[1].source) == ("nus", "words", "task")
    assert dropped >= 1 and len(train) + dropped >= 21
    assert [prompt.source for prompt in held_out] == ["task", "task"]
    check_prompts(several, train, held_out, 1000)
    with pytest.raises(PromptError, match="the model's vocabulary ends at 1"):
        check_prompts(several, train, held_out, 2)
    with pytest.raises(PromptError, match="a batch has 3 prompts of words, which has 1"):
        prompt_source(
            config(
                model,
                data={"task": None, "sources": [{**words, "weight": 9}, task]},
            ),
            train,
        )


def test_held_out_prompts_that_are_trained_on_are_said(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "task": None,
        "prompts": str(model / "a.jsonl"),
        "eval_prompts": str(model / "b.jsonl"),
    }
    for name, numbers in (("a", [1, 2, 2, 3]), ("b", [9, 3, 1])):
        write_jsonl(
            model / f"{name}.jsonl", [{"prompt": f"{WORD} {i}", "answer": str(i)} for i in numbers]
        )
    made = config(model, data=files)
    tokenizer = load_tokenizer(made)
    for cache in (None, prompt_cache(made), prompt_cache(made)):  # also when it is read again
        load_data(made, tokenizer, cache)
        notes = capsys.readouterr().err
        assert (
            f'warning: 2 of 3 held-out prompts are training prompts too, the first is "{WORD} 3"; '
            in notes
        )
        assert "a.jsonl: 1 of 4 prompts repeat another one (3 are distinct)" in notes
    monkeypatch.setenv("RANK", "1")
    load_data(made, tokenizer)
    assert capsys.readouterr().err == ""


def test_held_out_prompts_are_of_the_held_out_split(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        (model / "data").mkdir(exist_ok=True)
        write_jsonl(model / "data" / f"{name}.jsonl", [{"prompt": name, "answer": name}])
    made = config(
        model, data={"task": None, "prompts": f"{model}/data", "eval_prompts": f"{model}/data"}
    )
    train, held_out, _ = load_data(made, load_tokenizer(made))
    assert ([prompt.answer for prompt in train], [prompt.answer for prompt in held_out]) == (
        ["train"],
        ["test"],
    )
    assert "the split test is read (of test, train)" in capsys.readouterr().err


def test_prompts_of_a_cache(model: Path, tmp_path: Path) -> None:
    files = {
        "task": None,
        "prompts": str(model / "a.jsonl"),
        "eval_prompts": str(model / "b.jsonl"),
    }
    for name, count in (("a", 5), ("b", 3)):
        write_jsonl(
            model / f"{name}.jsonl",
            [{"prompt": f"{WORD} {i}", "answer": str(i)} for i in range(count)],
        )
    made = config(model, data=files, evaluation={"max_prompts": 2})
    tokenizer = load_tokenizer(made)
    plain = load_data(made, tokenizer)
    for _ in range(2):
        train, held_out, dropped = load_data(made, tokenizer, prompt_cache(made))
        for cached, wanted in ((train, plain[0]), (held_out, plain[1])):
            assert [prompt.token_ids.tolist() for prompt in cached] == [
                prompt.token_ids.tolist() for prompt in wanted
            ]
            assert [prompt.answer for prompt in cached] == [prompt.answer for prompt in wanted]
        assert (len(train), len(held_out), dropped) == (5, 2, 0)
    assert len(list((tmp_path / "run" / "prompts").glob("*/manifest.json"))) == 2
    largest = max(int(prompt.token_ids.max()) for prompt in train)
    check_prompts(made, train, held_out, vocab_size=largest + 1)
    with pytest.raises(
        PromptError, match=f"has the token id {largest}, .* vocabulary ends at {largest - 1};"
    ):
        check_prompts(made, train, held_out, vocab_size=largest)
    other = config(model, data=files | {"cache_dir": str(tmp_path / "shared")})
    load_data(other, tokenizer, prompt_cache(other))
    assert len(list((tmp_path / "shared").glob("*/manifest.json"))) == 2


def test_a_cache_that_cannot_be_written_is_reported_once_a_node(
    model: Path, capsys, monkeypatch
) -> None:
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        prompt_cache(config(model)).warn("data.cache_dir = here: no space")
        assert capsys.readouterr().err.count("warning: data.cache_dir = here: no space\n") == count
