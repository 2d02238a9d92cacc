"""The files beside a model's weights that exports hold: all that a tokenizer or processor
reads, and no others.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from megatron_gspo.models import ModelError
from megatron_gspo.models.companions import companions, copy_companions

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tool_use.jinja",
    "additional_chat_templates/rag.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
OTHERS = (
    "README.md",
    "model.safetensors",
    "pytorch_model.bin",
    "optimizer.pt",
    "model.safetensors.index.json",
)


def model_directory(folder: Path, names: tuple[str, ...] = FILES + OTHERS) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}" if name.endswith(".json") else name)
    return folder


def copied(source: Path, target: Path) -> set[str]:
    target.mkdir()
    copy_companions(source, target)
    return {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}


def test_all_that_tokenizers_and_processors_read_is_copied(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source")
    assert copied(source, tmp_path / "target") == set(FILES)
    assert (
        (tmp_path / "target" / "additional_chat_templates" / "rag.jinja")
        .read_text()
        .endswith("rag.jinja")
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_that_a_config_names_is_copied_with_what_it_imports(name: str, tmp_path: Path) -> None:
    source = model_directory(
        tmp_path / "source", ("config.json", "tokenization_kimi.py", "tool_declaration_ts.py")
    )
    content = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (source / name).write_text(json.dumps(content))
    assert copied(source, tmp_path / "target") == {
        "config.json",
        name,
        "tokenization_kimi.py",
        "tool_declaration_ts.py",
    }
    assert json.loads((tmp_path / "target" / name).read_text()) == content


def test_code_that_no_config_names_is_not_copied(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source", ("config.json", "train.py"))
    assert copied(source, tmp_path / "target") == {"config.json"}


def test_classes_without_their_code_leave_the_auto_map(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source", ("config.json", "configuration_x.py"))
    kept = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "org/other--modeling_y.Y"}
    (source / "config.json").write_text(
        json.dumps({"a": 1, "auto_map": kept | {"AutoTokenizer": ["absent.Z", None]}})
    )
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["absent.Z", None]}})
    )
    copied(source, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == {
        "a": 1,
        "auto_map": kept,
    }
    assert json.loads((tmp_path / "target" / "tokenizer_config.json").read_text()) == {}


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source", ("config.json",))
    (source / "tokenizer_backup").mkdir()
    (source / "chat_template.old.jinja").symlink_to("/nonexistent")
    (source / "tokenizer_loop").symlink_to("tokenizer_loop")
    (source / "additional_chat_templates").write_text("a file")
    (source / "vocab.json").mkdir()
    os.mkfifo(source / "merges.txt")
    assert copied(source, tmp_path / "target") == {"config.json"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "inner/../../secret"])
def test_a_link_out_of_the_directory_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    source = model_directory(tmp_path / "source", ("config.json", "inner/x"))
    (source / "vocab.json").symlink_to(target)
    outside = re.escape(str((source / target).resolve()))
    with pytest.raises(
        ModelError, match=f"vocab.json: is a link to {outside}, outside of the model directory"
    ):
        companions(source)
    with pytest.raises(ModelError, match="outside"):
        copied(source, tmp_path / "target")


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/x -> ../../blobs/<hash>; and the directory itself may be a link to
    it.
    """
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, name in enumerate(
        ("config.json", "tokenizer.json", "additional_chat_templates/rag.jinja")
    ):
        (cache / "blobs" / f"hash{number}").write_text("{}")
        up = "../" * (name.count("/") + 2)
        (snapshot / name).symlink_to(f"{up}blobs/hash{number}")
    expected = {"config.json", "tokenizer.json", "additional_chat_templates/rag.jinja"}
    assert copied(snapshot, tmp_path / "target") == expected
    (tmp_path / "model").symlink_to(snapshot)
    assert copied(tmp_path / "model", tmp_path / "other") == expected
    (snapshot / "vocab.json").symlink_to("../../refs/main")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    with pytest.raises(ModelError, match="outside"):
        companions(snapshot)


def test_the_config_names_no_quantisation_of_the_source(tmp_path: Path) -> None:
    source = model_directory(tmp_path / "source", ("config.json",))
    (tmp_path / "target").mkdir()
    text = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}
    content = {"quantization_config": {"quant_method": "fp8"}, "text_config": text}
    (source / "config.json").write_text(json.dumps(content))
    copy_companions(source, tmp_path / "target", torch.float32)
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == {
        "text_config": {"dtype": "float32"}
    }
