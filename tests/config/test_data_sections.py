"""What the section `data` resolves to."""

from __future__ import annotations

from megatron_gspo.config import DataConfig
from megatron_gspo.config.code_section import CodeConfig


def test_the_tests_of_a_response_end_before_the_verifier_is_killed() -> None:
    code = CodeConfig(time_limit=2.0, score="fraction")
    options = DataConfig(
        verifier="code", verifier_timeout=30.0, code=code
    ).resolved_verifier_options
    assert options["time_budget"] == 22.0  # the last program may take 7 s more
    assert options["score"] == "fraction" and options["time_limit"] == 2.0
    assert DataConfig(verifier_options={"style": "boxed"}).resolved_verifier_options == {
        "style": "boxed"
    }
