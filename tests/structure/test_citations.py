"""A citation of something that does not exist is found, one of something that exists is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.citations import Project, command_faults, missing, span_faults

PROJECT = Project(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize(
    "span",
    [
        "tests/structure/citations.py:span_faults",
        "algorithms/policy_loss.py:policy_loss",
        "citations.py:Project.has_path",
        "docs/*.md",
        "structure/",
        "metrics.jsonl",
        "samples/step_NNNNNN.jsonl",
        "megatron_gspo.algorithms.policy_loss",
        "megatron_gspo.tools.plan",
        "model.path",
        "data.task.name",
        "data.*",
        "reward/mean",
        "policy_loss()",
        "make test",
        "python -m tests.seeded_bugs.run --list",
        "some words",
    ],
)
def test_what_exists_passes(span: str):
    assert span_faults(PROJECT, span) == []


@pytest.mark.parametrize(
    "span, fault",
    [
        ("tests/structure/gone.py", "no file tests/structure/gone.py"),
        ("citations.py:gone", "citations.py does not define gone"),
        ("citations.py:Project.gone", "citations.py does not define Project.gone"),
        ("gone/no_such_folder/", "no folder gone/no_such_folder/"),
        ("megatron_gspo.algorithms.gone", "no module or symbol megatron_gspo.algorithms.gone"),
        ("model.gone", "no config key model.gone"),
        ("model.gone=3", "no config key model.gone"),
        ("reward/gone", "no metric reward/gone"),
        ("gone_function()", "the source has no gone_function"),
        ("make gone", "no target make gone"),
        ("JOBS=3 make gone", "no target make gone"),
        ("megatron-gspo gone", "no subcommand megatron-gspo gone"),
        ("python -m megatron_gspo.gone", "no module megatron_gspo.gone"),
        ("python tools/gone.py", "no file tools/gone.py"),
        ("python -m megatron_gspo.tools.plan --gone", "no option --gone"),
    ],
)
def test_what_does_not_exist_is_found(span: str, fault: str):
    assert span_faults(PROJECT, span) == [fault]


def test_code_blocks_are_read(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("Text\n\n```bash\nmake gone  # not make test\n```\n\n```yaml\nmodel:\n  gone: 1\nother: 2\n```\n")
    assert missing(PROJECT, page) == ["no config key model.gone", "no target make gone"]


def test_every_command_of_a_block_is_read():
    assert command_faults(PROJECT, "make test\nmake gone\ntorchrun -m megatron_gspo.train run.yaml model.gone=1\n") == [
        "no target make gone",
        "no config key model.gone",
    ]
