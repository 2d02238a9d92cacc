"""The pins of the environments that `tools/server_environment.py` makes; making one is part of
`make test-sglang`.
"""

from __future__ import annotations

import re

import pytest

from megatron_gspo.tools.server_environment import ENGINES, TORCH, pins_of, server_python

PINNED = [(engine, version) for engine, pinned in ENGINES.items() for version in pinned.versions]


def pins(engine: str, version: str) -> dict[str, str]:
    lines = pins_of(engine, version).read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    assert all(found), "every line is an exact pin"
    return {match[1].lower(): match[2] for match in found if match}


@pytest.mark.parametrize(("engine", "version"), PINNED)
def test_pins_are_exact_and_torch_comes_apart(engine, version):
    found = pins(engine, version)
    assert found[ENGINES[engine].package] == version
    assert TORCH.split("==")[0] not in found


def test_a_version_without_pins_is_refused():
    with pytest.raises(
        ValueError, match="no pins for sglang '0.4.0'; there are some for 0.5.23, 0.5.15.post1"
    ):
        server_python("sglang", "0.4.0")
