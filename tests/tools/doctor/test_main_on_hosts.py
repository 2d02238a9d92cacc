"""The doctor on two hosts: network namespaces with addresses and names of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.doctor_processes import doctor
from tests.support.network_hosts import CONFIGURATION, hosts, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")


def on_two_hosts(folder: Path, *, misnamed: bool) -> tuple[list[int], dict[str, Any]]:
    """Exit codes and the findings by check. misnamed: the second host's name means its own loopback, as Debian's
    installer leaves it."""
    with hosts(2, prefix=f"doctor{os.getpid()}") as found:
        if misnamed:
            names = CONFIGURATION / found[1].name / "hosts"
            names.write_text(names.read_text().replace(f"{found[1].address} ", "127.0.1.1 "))
        first, second = doctor(folder, "--json", "--timeout", "30", world=2, hosts=found)
    assert second.out == "" and first.out, first.err
    return [first.code, second.code], {f["check"]: f for f in json.loads(first.out)["findings"]}


def test_two_hosts(tmp_path):
    codes, found = on_two_hosts(tmp_path, misnamed=False)
    assert codes[0] == codes[1] < 2
    assert "all 2 ranks are present, on 2 hosts" in found["ranks.all"]["what"]
    assert found["ranks.hostnames"]["level"] == found["ranks.clocks"]["level"] == "ok"
    assert "2 over gloo, exact" in found["groups.world"]["what"]


def test_a_host_whose_name_means_itself(tmp_path):
    codes, found = on_two_hosts(tmp_path, misnamed=True)
    assert codes == [2, 2]
    assert found["ranks.hostnames"]["level"] == "error" and "resolves to 127.0.1.1" in found["ranks.hostnames"]["what"]
    assert "skipped" in found["groups.all"]["what"]
