"""Configs that can't work: wrong keys, values that contradict each other, layouts that don't
fit.
"""

from __future__ import annotations

import shutil
import socket
import sys

import pytest
import torch

from tests.support.command_line import Case, check, command_line, small_config, start
from tests.support.ports import free_port

TP = "parallel.tensor_model_parallel_size"
FP8 = "rollout.quantization.format=fp8_block"
ATTENTION = "rollout.quantization.modules=[model.layers.*.self_attn.*]"


def run_dir_is_a_file(config, folder):
    (folder / "run").write_text("")


def model_of_an_earlier_run(config, folder):
    config["model"]["path"] = str(shutil.copytree(config["model"]["path"], folder / "run" / "hf"))


CASES = (
    Case(
        "unknown key",
        "is not a key; remove it, or see docs/config.md for the keys",
        ("zzz=1",),
        shows=("zzz = 1",),
    ),
    Case(
        "token clip under GSPO",
        "is outside the clip range of a sequence ratio",
        ("algorithm.epsilon_low=0.2",),
        shows=("epsilon_low = 0.2", "use about 3e-4"),
    ),
    Case(
        "GSPO averaged over tokens",
        "is not gspo",
        ("algorithm.loss_agg_mode=token-mean",),
        shows=("seq-mean-token-mean",),
    ),
    Case(
        "half of the loop without batches",
        "needs a directory of rollout batches",
        ("training.only=train",),
        shows=('training.only = "train"', "set training.batches"),
    ),
    Case(
        "a profile of a step after the end",
        "the run ends after training.steps",
        ("profile.steps=[1000000]",),
        shows=("profile.steps = [1000000]", "name earlier steps"),
    ),
    Case(
        "unknown algorithm",
        "is no preset; set one of",
        ("algorithm.name=reinforce",),
        shows=("gspo_token", "an objective of your own"),
    ),
    Case(
        "surrogate file missing",
        "no such file absent.py; check the path",
        (
            "algorithm.name=mine",
            "algorithm.surrogate=absent.py:loss",
            "algorithm.importance_sampling_level=token",
            "algorithm.loss_agg_mode=token-mean",
        ),
        shows=("algorithm.surrogate = 'absent.py:loss'",),
    ),
    Case(
        "TP doesn't fit the world",
        "does not divide 1 processes",
        (f"{TP}=2",),
        shows=("TP x PP x CP = 2 x 1 x 1",),
    ),
    Case(
        "unknown Megatron option",
        "is not an option of TransformerConfig, OptimizerConfig, DistributedDataParallelConfig of"
        " megatron-core ",
        ("megatron.zzz=1",),
        shows=("megatron.zzz = 1", "remove it"),
    ),
    Case(
        "half of a fused weight",
        "and engines keep both in one parameter",
        (
            FP8,
            ATTENTION,
            (
                "rollout.quantization.exclude=[model.layers.*.self_attn.k_proj,"
                " model.layers.*.mlp.*, model.layers.*.mlp.experts.*.*, lm_head]"
            ),
        ),
        shows=("list both, or exclude both",),
    ),
    Case(
        "adapters to start from that are not there",
        "has no adapter_config.json",
        ("lora.rank=8", "lora.adapter_path=nowhere"),
        shows=("lora.adapter_path", "give a PEFT directory, or null"),
    ),
    Case(
        "teacher under GSPO",
        "gives an advantage per token; gspo has one ratio and one advantage per response",
        ("distillation.teacher=teacher",),
        shows=("distillation.teacher", "set algorithm.name: gspo_token"),
    ),
    Case(
        "run_dir is a file",
        "is a file; choose another directory",
        breaks=run_dir_is_a_file,
        shows=("run_dir = ",),
    ),
    Case(
        "model within run_dir",
        "is what an earlier run left in run_dir",
        breaks=model_of_an_earlier_run,
        code=1,
        shows=("model.path = ", "choose another run_dir"),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_config(case, model, tmp_path):
    config = small_config(model, tmp_path, training={"global_batch_size": 8})
    if case.breaks:
        case.breaks(config, tmp_path)
    check(case, start(config, tmp_path, *case.overrides))


NOT_INSTALLED = {
    "wandb": Case(
        "a tracker that is not installed",
        "is not installed; pip install",
        ("tracking.wandb=true",),
        shows=("tracking.wandb is set", "or set the key to false"),
    ),
    "math_verify": Case(
        "a verifier whose package is not installed",
        "verifier math_verify needs math-verify: pip install",
        ("data.verifier=math_verify", "data.verifier_timeout=null"),
    ),
}


@pytest.mark.parametrize("package", NOT_INSTALLED)
def test_a_package_that_is_not_installed(package, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # what Python puts there to refuse an import
    case = NOT_INSTALLED[package]
    config = small_config(model, tmp_path, training={"global_batch_size": 8})
    check(case, start(config, tmp_path, *case.overrides))


def test_no_config_at_all(tmp_path):
    check(Case("no argument", "CONFIG.yaml: is missing"), command_line())
    missing = Case("config file missing", "cannot read the config: no such file")
    check(missing, command_line(str(tmp_path / "absent.yaml")))


ALONE = Case(
    "processes that don't find each other", "did not find each other in 0.02 minutes", code=1
)
NO_GPU = Case(
    "nccl without a GPU",
    "needs a GPU, and torch ",
    overrides=("parallel.backend=nccl",),
    shows=("parallel.backend", "set it to auto or gloo"),
)
NO_NUMBER = Case(
    "text in WORLD_SIZE", "is not a number of processes; correct it", shows=("WORLD_SIZE='four'",)
)
PORT_IN_USE = Case(
    "master port in use",
    "is in use on this machine; end the process that listens there",
    code=1,
    shows=("MASTER_PORT=", "--master-port"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_nccl_without_a_gpu(model, tmp_path):
    check(NO_GPU, start(small_config(model, tmp_path), tmp_path, *NO_GPU.overrides))


def test_a_number_of_processes_that_is_none(model, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "four")
    check(NO_NUMBER, start(small_config(model, tmp_path), tmp_path))


def test_a_port_that_another_process_has(model, tmp_path, monkeypatch):
    with socket.create_server(("", 0)) as taken:
        address = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": taken.getsockname()[1],
        }
        for name, value in address.items():
            monkeypatch.setenv(name, str(value))
        check(PORT_IN_USE, start(small_config(model, tmp_path), tmp_path))


@pytest.mark.parametrize("has_address", [False, True])
def test_a_rank_alone(has_address, model, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    if has_address:
        for name, value in {
            "RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }.items():
            monkeypatch.setenv(name, value)
    config = small_config(model, tmp_path, parallel={"distributed_timeout_minutes": 0.02})
    check(ALONE, start(config, tmp_path))
