"""The messages of the catalogue in docs/troubleshooting.md."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_gspo.config import SGLangConfig
from tests.bad_input.page import CASES, FIXES, PAGE, filled

ROOT = Path(__file__).parents[2]


def test_each_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_page_has_the_messages_of_today() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "python -m tests.bad_input.page"


def test_every_fix_belongs_to_a_case() -> None:
    assert set(FIXES) - {case.name for case in CASES} == set()


def test_the_messages_of_servers_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    section = page.split("Messages when a server does not start:", 1)[1].split("\n## ", 1)[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    folders = [ROOT / "megatron_gspo" / name for name in ("servers", "rollout/sglang")]
    source = "".join(
        file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("*.py")
    )
    source = source.replace("{section}", SGLangConfig.section)
    assert len(messages) >= 8 and [message for message in messages if message not in source] == []
