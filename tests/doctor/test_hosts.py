"""The doctor on two hosts: network namespaces with addresses and names of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import CONFIGURATION, hosts, why_not

ROOT = Path(__file__).parents[2]


def on_two_hosts(*, misnamed: bool) -> tuple[list[int], dict[str, Any]]:
    """Exit codes and the findings by check. misnamed: the second host's name means its own loopback, as Debian's
    installer leaves it."""
    with hosts(2, prefix=f"doctor{os.getpid()}") as found:
        if misnamed:
            names = CONFIGURATION / found[1].name / "hosts"
            names.write_text(names.read_text().replace(f"{found[1].address} ", "127.0.1.1 "))
        common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": found[0].address,
                  "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | common
        command = [sys.executable, "-m", "megatron_gspo.doctor", "--json", "--timeout", "30"]
        processes = [
            subprocess.Popen(host.command(command), env=environment | {"RANK": str(rank)}, cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for rank, host in enumerate(found)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs[1] == ""
    return [process.returncode for process in processes], {f["check"]: f for f in json.loads(outputs[0])["findings"]}


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces")
def test_two_hosts():
    codes, found = on_two_hosts(misnamed=False)
    assert codes[0] == codes[1] < 2
    assert "all 2 ranks are here, on 2 hosts" in found["ranks.all"]["what"]
    assert found["ranks.hostnames"]["level"] == found["ranks.clocks"]["level"] == "ok"
    assert "2 over gloo, exact" in found["groups.world"]["what"]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces")
def test_a_host_whose_name_means_itself():
    codes, found = on_two_hosts(misnamed=True)
    assert codes == [2, 2]
    assert found["ranks.hostnames"]["level"] == "error" and "resolves to 127.0.1.1" in found["ranks.hostnames"]["what"]
    assert "not tried" in found["groups.all"]["what"]
