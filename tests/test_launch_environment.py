"""The variables of a pod or a job: a command of one process does not wait for others, and
torchrun's processes do.
"""

from __future__ import annotations

import os

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.launch_environment import (
    local_world_size,
    run_alone,
    warn_of_ignored_processes,
)

POD = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "0",
    "PET_NPROC_PER_NODE": "auto",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in [*POD, *TORCHRUN]:
        monkeypatch.delenv(name, raising=False)
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def test_a_command_of_one_process_forgets_the_pods_others(environment, monkeypatch):
    environment({**POD, "LOCAL_RANK": "0", "MY_RANK": "kept"})
    run_alone()
    assert not POD.keys() & os.environ.keys()
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["MY_RANK"] == "kept"
    monkeypatch.delenv("MY_RANK")
    run_alone()


def test_processes_of_torchrun_keep_their_numbers(environment):
    environment(TORCHRUN)
    run_alone()
    assert TORCHRUN.items() <= os.environ.items()


def test_a_run_of_one_process_says_that_the_others_are_ignored(environment, capsys):
    environment({**POD, "WORLD_SIZE": "1"})
    warn_of_ignored_processes()
    assert capsys.readouterr().err == ""
    environment(POD)
    warn_of_ignored_processes()
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "WORLD_SIZE=4" in line
    assert "python -m megatron_gspo.train" in line
    environment(TORCHRUN)
    warn_of_ignored_processes()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "4"}, 4),  # started without torchrun, on one node
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8),
    ],
)
def test_processes_of_a_node(variables, expected):
    assert local_world_size(variables) == expected


def test_what_is_no_number_of_processes_is_refused():
    with pytest.raises(InputError, match="^LOCAL_WORLD_SIZE='auto' in the environment: is not a"):
        local_world_size({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "auto"})
