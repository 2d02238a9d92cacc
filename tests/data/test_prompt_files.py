"""Files of prompts: formats, and errors that name the place."""
import json
import sys

import pytest

from megatron_gspo.config import DataConfig
from megatron_gspo.data.prompt_files import PromptError, optional_module, read_rows
from megatron_gspo.data.prompts import load_prompts
from megatron_gspo.errors import InputError
from tests.support.prompt_rows import CHAT, ROWS, write_jsonl
from tests.support.samples import CharTokenizer


def write_kind(kind, folder):
    rows = [row | {"answer": str(row["answer"])} for row in ROWS]  # columns have one type
    if kind == "jsonl":
        return write_jsonl(folder / "data.jsonl", rows)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
        return folder / "data.parquet"
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(rows)
    target = folder / "saved"
    (datasets.DatasetDict({"train": dataset}) if kind == "splits" else dataset).save_to_disk(target)
    return next(target.glob("*.arrow")) if kind == "arrow" else target


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory", "splits", "arrow"])
def test_every_kind_of_file_gives_the_same_prompts(kind, tmp_path):
    loaded = load_prompts(write_kind(kind, tmp_path), CharTokenizer())
    assert loaded.dropped == 0 and len(loaded.prompts) == 2
    first, second = loaded.prompts
    first.check()
    assert first.token_ids.tolist() == [1, ord("a"), ord(" "), ord("b")]
    assert (first.index, first.text, first.answer, first.metadata) == (0, "a b", "c", {"level": 1})
    assert (second.index, second.text, second.answer, second.metadata) == (1, "dé", "7", {"level": 2})


def test_blank_lines_numbers_and_nulls(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 1.5}\n\n{"prompt": "b", "answer": null}\n')
    assert [p.answer for p in load_prompts(path, CharTokenizer()).prompts] == ["1.5", None]
    bare = write_jsonl(path, [{"q": "x"}])
    loaded = load_prompts(bare, CharTokenizer(), DataConfig(prompt_key="q", answer_key=None))
    assert loaded.prompts[0].answer is None


@pytest.mark.parametrize(
    ("content", "chosen", "message"),
    [
        ("", {}, "data.jsonl: holds no prompts; give it at least one row"),
        ("\n\n", {}, "data.jsonl: holds no prompts; give it at least one row"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": ', {}, "data.jsonl line 2: not JSON (Expecting value"),
        (b"\xff\xfe{}", {}, "data.jsonl line 1: not JSON ("),
        ("[1, 2]", {}, "data.jsonl line 1: a JSON list; write one JSON object a line"),
        (
            '{"question": "a", "answer": "b"}',
            {},
            "line 1: key 'prompt' is missing (found: answer, question); set prompt_key to the right one",
        ),
        ('{"prompt": "a"}', {}, "line 1: key 'answer' is missing (found: prompt); set answer_key to"),
        (
            '{"prompt": 3, "answer": ""}',
            {},
            "line 1: key 'prompt' is a int; it must be text or a list of chat",
        ),
        (
            '{"prompt": [], "answer": ""}',
            {},
            "line 1: key 'prompt' is a list; it must be text or a list of chat",
        ),
        ('{"prompt": " ", "answer": ""}', {}, "line 1: key 'prompt' is empty; remove the row"),
        ('{"prompt": "a", "answer": [1]}', {}, "line 1: key 'answer' is a list; it must be text or a number"),
        (json.dumps({"prompt": CHAT, "answer": ""}), {}, "holds chat messages; set chat_template to true"),
        ("{}", {"system_prompt": "s"}, 'data.system_prompt = "s": needs the chat template'),
        ("{}", {"prompt_template": "Q"}, 'data.prompt_template = "Q": would drop the question'),
        (
            json.dumps({"prompt": [{"role": "system", "content": "x"}, *CHAT], "answer": ""}),
            {"chat_template": True, "system_prompt": "s"},
            "line 1: has a system message and system_prompt is set; remove one of them",
        ),
    ],
)
def test_bad_files_name_the_place_the_key_and_the_fix(content, chosen, message, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        load_prompts(path, CharTokenizer(), DataConfig(**chosen))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_paths(tmp_path):
    with pytest.raises(PromptError, match="nowhere.jsonl: no such file; check the path"):
        read_rows(tmp_path / "nowhere.jsonl")
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(PromptError, match="unknown kind '.csv'; use .jsonl, .parquet"):
        read_rows(tmp_path / "data.csv")


def test_unreadable_parquet_and_datasets(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data.parquet").write_text("not parquet")
    with pytest.raises(PromptError, match=r"data.parquet: not Parquet \(.*\); write the file again"):
        read_rows(tmp_path / "data.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match=r"empty: not a saved dataset \(.*\); write it with save_to_disk"):
        read_rows(tmp_path / "empty")
    with pytest.raises(PromptError, match="has no split 'test'; it has train"):
        read_rows(write_kind("splits", tmp_path), split="test")


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(
        ImportError, match=r"reading x.parquet needs no-such: pip install 'megatron-gspo\[data\]'"
    ):
        optional_module("no_such_module", "no-such", "data", "reading x.parquet")
    assert "no_such_module" not in sys.modules
