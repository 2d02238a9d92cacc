"""SGLang's chat completions as a judge."""

from __future__ import annotations

from pathlib import Path

from tests.sglang.test_servers import MODULE
from tests.support.real_judge import assert_it_judges


def test_it_judges(sglang_url: str, sglang_model: str, tmp_path: Path) -> None:
    assert_it_judges(sglang_url, sglang_model, MODULE, tmp_path)
