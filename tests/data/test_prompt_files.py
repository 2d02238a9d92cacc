"""Files of prompts: formats, and errors that name the place."""

import bz2
import gzip
import json
import lzma
import sys

import pytest

from megatron_gspo.config import DataConfig
from megatron_gspo.data.optional_module import optional_module
from megatron_gspo.data.prompt_files import HELD_OUT, PromptError, read_rows, split_notes
from megatron_gspo.data.prompts import load_prompts
from megatron_gspo.errors import InputError, MissingPackageError
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
    assert (second.index, second.text, second.answer, second.metadata) == (
        1,
        "dé",
        "7",
        {"level": 2},
    )


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
        (
            '{"prompt": "a", "answer": "b"}\n{"prompt": ',
            {},
            "data.jsonl line 2: not JSON (Expecting value",
        ),
        (b"\xff\xfe{}", {}, "data.jsonl line 1: not JSON ("),
        ("[1, 2]", {}, "data.jsonl line 1: a JSON list; write one JSON object a line"),
        (
            '{"question": "a", "answer": "b"}',
            {},
            (
                "line 1: key 'prompt' is missing (found: answer, question); set prompt_key to the"
                " right one"
            ),
        ),
        (
            '{"prompt": "a"}',
            {},
            "line 1: key 'answer' is missing (found: prompt); set answer_key to",
        ),
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
        (
            '{"prompt": "a", "answer": [1]}',
            {},
            "line 1: key 'answer' is a list; it must be text or a number",
        ),
        (
            json.dumps({"prompt": CHAT, "answer": ""}),
            {},
            "holds chat messages; set chat_template to true",
        ),
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


def test_unreadable_parquet_and_datasets(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data.parquet").write_text("not parquet")
    with pytest.raises(
        PromptError, match=r"data.parquet: not Parquet \(.*\); write the file again"
    ):
        read_rows(tmp_path / "data.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        PromptError, match=r"empty: not a saved dataset \(.*\); write it with save_to_disk"
    ):
        read_rows(tmp_path / "empty")
    with pytest.raises(PromptError, match="has no split 'test'; it has train"):
        read_rows(write_kind("splits", tmp_path), split="test")


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(
        MissingPackageError,
        match=r"reading x.parquet needs no-such: pip install 'megatron-gspo\[data\]'",
    ):
        optional_module("no_such_module", "no-such", "data", "reading x.parquet")
    assert "no_such_module" not in sys.modules


QA = [{"prompt": "a b", "answer": "c"}, {"prompt": "dé", "answer": "7"}]
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in QA).encode()
TEXTS = {
    "byte order mark.jsonl": b"\xef\xbb\xbf" + JSON_LINES,
    "carriage returns.jsonl": JSON_LINES.replace(b"\n", b"\r\n"),
    "no last newline.ndjson": JSON_LINES.rstrip(),
    "lines.json": JSON_LINES,
    "list.json": b"\xef\xbb\xbf \n" + json.dumps(QA, indent=1).encode(),
    "UPPER.JSONL": JSON_LINES,
    "packed.jsonl.gz": gzip.compress(JSON_LINES),
    "packed.jsonl.bz2": bz2.compress(JSON_LINES),
    "packed.json.xz": lzma.compress(json.dumps(QA).encode()),
    "table.csv": 'prompt,answer\r\na b,c\r\n"dé",7\r\n'.encode(),
    "mark.csv": b"\xef\xbb\xbf" + "prompt,answer\na b,c\ndé,7".encode(),
    "table.tsv": "prompt\tanswer\na b\tc\ndé\t7\n".encode(),
    "table.csv.gz": gzip.compress("prompt,answer\na b,c\ndé,7\n".encode()),
}


def read(paths, **options):
    return [row for _, row in read_rows(paths, **options)]


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_text_as_programs_write_them(name, tmp_path):
    (tmp_path / name).write_bytes(TEXTS[name])
    assert read(tmp_path / name) == QA


def test_zstandard(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(JSON_LINES)
    assert read(tmp_path / "a.jsonl.zst") == QA


def test_csv_has_text_and_missing_values(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer\n"a,\nb",010\n' + "x" * 200_000 + ",\n")
    first, second = read_rows(tmp_path / "a.csv")
    assert first == (f"{tmp_path}/a.csv line 3", {"prompt": "a,\nb", "answer": "010"})
    assert second[1]["answer"] is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b"prompt,answer\na,b,c\n",
            "a.csv line 2: has more fields than the first line; quote",
        ),
        ("a.csv", b'prompt,answer\n"a,b\n', "a.csv after line 1: not CSV (unexpected end of data)"),
        ("a.csv", b"prompt,answer\n\xff,b\n", "not CSV ('utf-8' codec can't decode"),
        ("a.csv", b"", "a.csv: holds no prompts"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz line 1: cannot be read (Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(JSON_LINES * 99, mtime=0)[:-20],
            "cannot be read (Compressed file ended before",
        ),
        ("a.json", b'[{"prompt": "a"}, 3]', "a.json row 2: a JSON int"),
        ("a.json", b"[1, ", "a.json: not JSON (Expecting value"),
        ("a.arrow", b"no arrow", "a.arrow: not Arrow ("),
        ("a.arrow", b"", "a.arrow: not Arrow ("),
        ("a.parquet", b"", "a.parquet: not Parquet ("),
        ("a.parquet.gz", b"", "unknown kind '.gz'; use"),
        ("a.zip", b"", "unknown kind '.zip'; use"),
        (
            "a.jsonl",
            b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}",
            "line 1: has a number of more digits than",
        ),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000, "a.jsonl line 1: is nested too deeply"),
        (
            "a.jsonl",
            b'{"prompt": "a", "answer": "", "x": ' + b"[" * 700 + b"]" * 700 + b"}",
            "is nested too deeply",
        ),
        ("a.jsonl", JSON_LINES.decode().encode("utf-16"), "a.jsonl line 1: not JSON ('utf-16"),
    ],
)
def test_damaged_files_end_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError) as error:
        load_prompts(tmp_path / name, CharTokenizer())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def write_files(folder, names):
    """A file of one row for each name, whose prompt is the name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [{"prompt": name, "answer": ""}])


def prompts_of(paths, **options):
    return [row["prompt"] for row in read(paths, **options)]


def test_folders_lists_and_globs(tmp_path):
    write_files(tmp_path, ["b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden/d.jsonl", "_tmp.jsonl"])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert prompts_of(tmp_path) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert prompts_of(f"{tmp_path}/*.jsonl") == ["_tmp.jsonl", "a.jsonl", "b.jsonl"]
    assert prompts_of(f"{tmp_path}/**/?.jsonl") == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert prompts_of([f"{tmp_path}/b.jsonl", tmp_path / "deep"]) == ["b.jsonl", "deep/c.jsonl"]
    with pytest.raises(PromptError, match=r"/\*.parquet: no such file; check the path"):
        read(f"{tmp_path}/*.parquet")
    (tmp_path / "x.csv").write_text("prompt\n")
    with pytest.raises(
        PromptError, match=r"has files of several formats \(.csv, .jsonl\); give a glob of one"
    ):
        read(tmp_path)


def test_a_name_with_the_characters_of_a_glob_or_split_is_a_file(tmp_path):
    write_files(tmp_path, ["[a]*.jsonl", "run:3.jsonl"])
    assert prompts_of(tmp_path / "[a]*.jsonl") == ["[a]*.jsonl"]
    assert prompts_of(f"{tmp_path}/run:3.jsonl") == ["run:3.jsonl"]


def test_splits_of_a_folder_as_the_hub_has_it(tmp_path):
    names = [
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test-00000-of-00001.jsonl",
    ]
    write_files(tmp_path, names)
    assert prompts_of(tmp_path) == names[:2]
    assert prompts_of(tmp_path, split=HELD_OUT) == prompts_of(f"{tmp_path}:test") == names[2:]
    assert split_notes(tmp_path, split=HELD_OUT) == [
        f"{tmp_path}: the split test is read (of test, train)"
    ]
    assert split_notes(tmp_path) == split_notes(f"{tmp_path}:test", split=HELD_OUT) == []
    with pytest.raises(
        PromptError, match=r"has no split 'dev'; it has test, train; name one, as .*:test"
    ):
        read(f"{tmp_path}:dev")
    write_files(tmp_path, ["data/extra.jsonl"])
    with pytest.raises(
        PromptError, match=r"has files of the splits test, train, and others \(extra.jsonl\)"
    ):
        read(tmp_path)


def test_several_configurations_of_a_data_set_are_not_mixed(tmp_path):
    write_files(tmp_path, ["main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl"])
    with pytest.raises(
        PromptError, match=r"has one split in several folders \(main, socratic\); give one of them"
    ):
        read(tmp_path)
    assert prompts_of(tmp_path / "main") == ["main/train-0.jsonl"]


def test_splits_of_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")

    def save(*names):
        folder = tmp_path / "_".join(names)
        parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in names}
        datasets.DatasetDict(parts).save_to_disk(folder)
        return folder

    assert prompts_of(save("train", "test")) == ["train"]
    assert prompts_of(save("train", "validation"), split=HELD_OUT) == ["validation"]
    both = save("train", "validation", "test")
    assert prompts_of(both, split=HELD_OUT) == ["test"]
    assert prompts_of(f"{both}:validation") == ["validation"]
    for name in ("train", "train_sft"):
        with pytest.raises(
            PromptError, match=f"has no split test or validation; it has {name}; name one, as"
        ):
            read(save(name), split=HELD_OUT)
    with pytest.raises(PromptError, match="has no split 'train'; it has train_sft; name one"):
        read(tmp_path / "train_sft")
    datasets.Dataset.from_list(QA).with_format("numpy").save_to_disk(tmp_path / "plain")
    assert read(tmp_path / "plain", split=HELD_OUT) == QA
    with pytest.raises(PromptError, match="plain: has no splits; leave out :test"):
        read(f"{tmp_path}/plain:test")


def test_arrow_files_of_both_forms(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(QA)
    for name, make in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with make(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
        assert read(tmp_path / f"{name}.arrow") == QA
