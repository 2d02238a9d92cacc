"""The Kubernetes example: it parses, and what its pods run is valid for the script, the config
and the server tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gspo.cli import COMMANDS, PROGRAM
from megatron_gspo.config import load_config
from megatron_gspo.config.load import split_server_arguments
from megatron_gspo.tools import serve
from tests.launch.test_configs import processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "examples" / "launch" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_pods_make_the_world_that_the_config_is_for(parts):
    replicas = parts["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    nodes = sum(role["replicas"] for role in replicas.values())
    assert nodes == int(environment["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["PROCESSES"])

    config_file, *overrides = container["args"]
    assert (ROOT / container["command"][0]).is_file()
    assert nodes * int(environment["PROCESSES"]) == processes(ROOT / config_file)
    config = load_config(ROOT / config_file, overrides)
    host = f"{parts['StatefulSet']['metadata']['name']}-0.{parts['Service']['metadata']['name']}"
    assert list(config.sglang.urls) == [f"http://{host}:31000", f"http://{host}:31001"]


def test_the_servers_are_those_that_the_run_is_told(parts):
    [container] = parts["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    program, command = container["command"]
    assert program == PROGRAM and COMMANDS[command].module == serve.__name__
    ours, theirs = split_server_arguments(container["args"])
    options = serve._parser().parse_args(ours)
    assert (options.servers, options.port, theirs) == (
        2,
        31000,
        {"sglang": ["--host=0.0.0.0", "--tp-size=4"]},
    )
    labels = parts["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == labels
    assert parts["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
