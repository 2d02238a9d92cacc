"""The pins of the environments that `tools/sglang_environment.py` makes; making one is part of `make test-sglang`."""

from __future__ import annotations

import re

import pytest

from megatron_gspo.tools.sglang_environment import PINS, TORCH, VERSIONS, sglang_python


def pins(version: str) -> dict[str, str]:
    lines = (PINS / f"requirements-{version}.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    assert all(found), "every line is an exact pin"
    return {match[1].lower(): match[2] for match in found if match}


@pytest.mark.parametrize("version", VERSIONS)
def test_pins_are_exact_and_torch_comes_apart(version):
    assert pins(version)["sglang"] == version
    assert TORCH.split("==")[0] not in pins(version)


def test_the_older_version_shares_all_but_a_few_packages():
    newer, older = (pins(version) for version in VERSIONS)
    assert newer.keys() == older.keys()
    differing = {name for name in newer if newer[name] != older[name]}
    assert differing == {"openai", "sglang", "tokenizers", "transformers", "xgrammar"}


def test_a_version_without_pins_is_refused():
    with pytest.raises(ValueError, match="no pins for sglang '0.4.0'; there are some for 0.5.23, 0.5.15.post1"):
        sglang_python("0.4.0")
