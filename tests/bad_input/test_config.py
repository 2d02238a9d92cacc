"""Configs that can't work: wrong keys, values that contradict each other, layouts that don't
fit.
"""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import asdict

import pytest
import torch
import yaml

from megatron_gspo.config import ConfigError, load_config
from megatron_gspo.loop.checkpoints import LoopState
from tests.support.command_line import Case, Outcome, check, command_line, small_config, start
from tests.support.ports import free_port

TP, PP, CP = (
    f"parallel.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")
)
EP = "parallel.expert_model_parallel_size"
ETP = "parallel.expert_tensor_parallel_size"
FP8 = "rollout.quantization.format=fp8_block"
ATTENTION = "rollout.quantization.modules=[model.layers.*.self_attn.*]"
VP = "parallel.virtual_pipeline_model_parallel_size"


def run_dir_is_a_file(config, folder):
    (folder / "run").write_text("")


def run_dir_below_a_file(config, folder):
    (folder / "taken").write_text("")
    config["run_dir"] = str(folder / "taken" / "run")


def used_run_dir(config, folder):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')


def run_of_another_model(config, folder):
    """A run with a checkpoint, which began with other weights."""
    checkpoint = folder / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(
        json.dumps({"state": asdict(LoopState(step=1)), "files": {}})
    )
    before = {"model": {"path": "/models/other"}, "environment": {"weights": "0123456789abcdef"}}
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(before))


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
        "misspelt key", "is not a key; did you mean", ("optimizer.lrr=1",), shows=("optimizer.lr?",)
    ),
    Case(
        "misspelt section",
        "is not a key; did you mean",
        ("trainng={steps: 3}",),
        shows=("training?",),
    ),
    Case(
        "text for a number",
        "is not allowed; set",
        ("optimizer.lr='1e-6'",),
        shows=("without quotes",),
    ),
    Case(
        "number out of range", "is not allowed; set", ("training.steps=0",), shows=("integer >= 1",)
    ),
    Case("not a number", "is not allowed; set", ("optimizer.lr=.nan",), shows=("number > 0",)),
    Case(
        "token clip under GSPO",
        "is outside the clip range of a sequence ratio",
        ("algorithm.epsilon_low=0.2",),
        shows=("epsilon_low = 0.2", "use about 3e-4"),
    ),
    Case(
        "sequence clip under GRPO",
        "is outside the clip range of a token ratio",
        ("algorithm.name=grpo", "algorithm.epsilon_low=3e-4"),
        shows=("epsilon_low = 0.0003", "use about 0.2"),
    ),
    Case(
        "GSPO averaged over tokens",
        "is not gspo",
        ("algorithm.loss_agg_mode=token-mean",),
        shows=("seq-mean-token-mean",),
    ),
    Case(
        "weights by sequence",
        "has two meanings: the product of a sequence's token ratios",
        ("algorithm.rollout_is=sequence",),
        shows=("write algorithm.rollout_is: geometric",),
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
        "unknown engine",
        "is not allowed; set one of",
        ("rollout.engine=tensorrt",),
        shows=("embedded",),
    ),
    Case(
        "unknown schedule",
        "is not allowed; set one of",
        ("optimizer.lr_decay_style=wsd",),
        shows=("cosine",),
    ),
    Case(
        "unknown data type", "is not allowed; set one of", ("model.dtype=fp8",), shows=("bfloat16",)
    ),
    Case(
        "one sample a prompt",
        "group advantages compare at least two responses",
        ("rollout.n_samples_per_prompt=1",),
        shows=("set it to 2 or more",),
    ),
    Case(
        "SFT on samples",
        "does not go with algorithm.name",
        ("algorithm.name=sft",),
        shows=("rollout.engine: sft",),
    ),
    Case(
        "TP doesn't fit the world",
        "does not divide 1 processes",
        (f"{TP}=2",),
        shows=("TP x PP x CP = 2 x 1 x 1",),
    ),
    Case(
        "PP doesn't fit the world",
        "does not divide 1 processes",
        (f"{PP}=2",),
        shows=("TP x PP x CP = 1 x 2 x 1",),
    ),
    Case(
        "CP doesn't fit the world",
        "does not divide 1 processes",
        (f"{CP}=2",),
        shows=("TP x PP x CP = 1 x 1 x 2",),
    ),
    Case(
        "EP doesn't fit the world",
        "does not divide 1 processes",
        (f"{EP}=2",),
        shows=("ETP x EP x PP = 1 x 2 x 1",),
    ),
    Case(
        "ETP doesn't fit the world",
        "does not divide 1 processes",
        (f"{ETP}=2",),
        shows=("ETP x EP x PP = 2 x 1 x 1",),
    ),
    Case(
        "heads not divisible by TP",
        "does not divide the model's num_attention_heads = ",
        (f"{TP}=3",),
        world=3,
    ),
    Case(
        "key-value heads not divisible by TP",
        "does not divide the model's num_key_value_heads = ",
        (f"{TP}=4",),
        world=4,
    ),
    Case(
        "layers not divisible by PP",
        "does not divide the model's num_hidden_layers = ",
        (f"{PP}=4",),
        world=4,
    ),
    Case(
        "experts not divisible by EP",
        "does not divide the model's num_experts = ",
        (f"{EP}=3",),
        world=3,
    ),
    Case(
        "expert width not divisible by ETP",
        "does not divide the model's moe_intermediate_size = ",
        (f"{ETP}=3",),
        world=3,
    ),
    Case("virtual stages without a pipeline", "needs a pipeline", (f"{VP}=2",)),
    Case(
        "virtual stages not dividing a stage",
        "does not divide the model's layers of a pipeline stage = 1",
        (f"{PP}=2", f"{VP}=2"),
        world=2,
    ),
    Case(
        "sequence parallelism without TP",
        "splits tokens between tensor-parallel ranks and there is one",
        ("parallel.sequence_parallel=true",),
    ),
    Case(
        "mini-batch doesn't divide the rollout",
        "does not divide the 8 sequences of a rollout batch",
        ("training.global_batch_size=3",),
    ),
    Case(
        "mini-batch smaller than the ranks",
        "data-parallel ranks without a sequence",
        ("training.global_batch_size=2",),
        world=4,
    ),
    Case(
        "fixed micro-batches don't fill the ranks",
        "data-parallel ranks does not divide it",
        ("training.micro_batch_size=3",),
        world=2,
    ),
    Case(
        "token budget below one sequence",
        "a sequence may take 38 tokens",
        ("training.max_tokens_per_micro_batch=16",),
        shows=("set at least 38",),
    ),
    Case(
        "longer than the model's positions",
        "positions; keep the sum within",
        ("rollout.max_response_length=100000", "training.max_tokens_per_micro_batch=200000"),
    ),
    Case(
        "warm-up longer than the run",
        "is longer than the run's 1 optimizer steps",
        ("optimizer.lr_warmup_steps=9",),
    ),
    Case(
        "misspelt Megatron option",
        "is not an option of TransformerConfig, OptimizerConfig, DistributedDataParallelConfig of"
        " megatron-core ",
        ("megatron.moe_permute_fusoin=true",),
        shows="did you mean moe_permute_fusion?",
    ),
    Case(
        "unknown Megatron option",
        "is not an option of TransformerConfig, OptimizerConfig, DistributedDataParallelConfig of"
        " megatron-core ",
        ("megatron.zzz=1",),
        shows=("megatron.zzz = 1", "remove it"),
    ),
    Case(
        "Megatron option that another key sets",
        "is set by optimizer.lr; remove it and set",
        ("megatron.lr=1e-3",),
        shows=("megatron.lr = 0.001",),
    ),
    Case(
        "Megatron option of another type",
        "has the wrong type; set",
        ("megatron.bucket_size='4096'",),
        shows=("an integer or null",),
    ),
    Case(
        "dropout",
        "makes the log-probs of one policy random",
        ("megatron.hidden_dropout=0.1",),
        shows=("megatron.hidden_dropout = 0.1", "remove it"),
    ),
    Case(
        "dropout of adapters",
        "log-probs would be of different random models",
        ("lora.rank=8", "lora.dropout=0.1"),
        shows=("lora.dropout = 0.1", "set it to 0"),
    ),
    Case(
        "adapter on the output layer",
        "is no linear layer of the model that can have an adapter",
        ("lora.rank=8", "lora.targets=[q_proj, lm_head]"),
        shows=("use some of q_proj",),
    ),
    Case(
        "quantised weights of no module",
        "matches no linear module; * stands for one component; did you mean",
        (FP8, "rollout.quantization.modules=[q_proj]"),
        shows=("model.layers.*.self_attn.q_proj?",),
    ),
    Case(
        "module in neither list",
        "linear modules are in neither list, the first is",
        (FP8, ATTENTION),
        shows=("add model.layers.*.mlp.gate to modules or to exclude",),
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
        "modules without a format",
        "has no effect with rollout.quantization.format = none",
        (ATTENTION,),
        shows=("set a format",),
    ),
    Case(
        "adapters to start from that are not there",
        "has no adapter_config.json",
        ("lora.rank=8", "lora.adapter_path=nowhere"),
        shows=("lora.adapter_path", "give a PEFT directory, or null"),
    ),
    Case(
        "expert capacity",
        "drops tokens by the load of their batch",
        ("megatron.moe_expert_capacity_factor=1.5",),
    ),
    Case(
        "per-token loss",
        "divides the loss again, which is normalized by the global batch",
        ("megatron.calculate_per_token_loss=true",),
    ),
    Case("auxiliary loss", "adds a term to the objective", ("megatron.moe_aux_loss_coeff=0.01",)),
    Case(
        "fused router",
        "bypasses the router hooks of routing replay and routing metrics",
        ("megatron.moe_router_fusion=true",),
        shows=("routing.replay: none and routing.metrics: false",),
    ),
    Case(
        "fused permutation without Transformer Engine",
        "uses kernels of Transformer Engine",
        ("megatron.moe_permute_fusion=true",),
        shows=("megatron.moe_permute_fusion = true", "install Transformer Engine, or remove it"),
    ),
    Case(
        "Megatron options that contradict",
        "rejects the options: CPU offloading does not work",
        (
            "megatron={cpu_offloading: true, cpu_offloading_num_layers: 1}",
            "model.recompute_granularity=full",
        ),
    ),
    Case(
        "two KL terms",
        "counts the KL twice",
        ("algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1"),
    ),
    Case(
        "override without a value", "is not an override; write key.sub=value", ("training.steps",)
    ),
    Case(
        "override with dashes",
        "overrides take no dashes",
        ("--training.steps=1",),
        shows=("training.steps=1",),
    ),
    Case("override into a value", "is a value, not a section", ("seed.value=1",)),
    Case(
        "text that YAML reads as another type",
        "is not allowed; set string, in quotes",
        ("data.prompt_key=no",),
    ),
    Case(
        "path with an unknown variable",
        "the environment has no variable ABSENT; set it, or write the whole path",
        ("run_dir=$ABSENT/run",),
        shows=('run_dir = "$ABSENT/run"',),
    ),
    Case(
        "path with another program's variable",
        "is not a variable; write ${NAME}",
        ("run_dir=${oc.env:HOME}/run",),
        shows=("${oc.env:HOME}",),
    ),
    Case(
        "path of an unknown user",
        "~nobody_here is not the home directory of any user; write the whole path",
        ("model.path=~nobody_here/model",),
    ),
    Case(
        "run_dir is a file",
        "is a file; choose another directory",
        breaks=run_dir_is_a_file,
        shows=("run_dir = ",),
    ),
    Case(
        "run_dir below a file", "is a file; choose another directory", breaks=run_dir_below_a_file
    ),
    Case(
        "run_dir of another run",
        "holds another run; choose another run_dir or set checkpoint.resume: auto",
        ("checkpoint.resume=never",),
        breaks=used_run_dir,
    ),
    Case(
        "run of another model",
        "began with another model",
        breaks=run_of_another_model,
        code=1,
        shows=("model.path = ", "/models/other", "choose another run_dir, or set model.path back"),
    ),
    Case(
        "model within run_dir",
        "is what an earlier run left in run_dir",
        breaks=model_of_an_earlier_run,
        code=1,
        shows=("model.path = ", "choose another run_dir"),
    ),
)

FILES = (
    (
        Case("config file missing", "cannot read the config: no such file", shows=("absent.yaml",)),
        None,
    ),
    (Case("config of no YAML", "is not YAML (line 2, column 4)"), b"seed: 1\n  a: b: c\n"),
    (Case("empty config", "is not a mapping of keys; start from a file in examples/"), b""),
    (Case("config of bytes", "is not UTF-8 text"), b"\xff\xfe\x00"),
    (Case("required key missing", "is missing; set it: "), b"seed: 1\n"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_config(case, model, tmp_path):
    config = small_config(model, tmp_path, training={"global_batch_size": 8})
    if case.breaks:
        case.breaks(config, tmp_path)
    if case.world == 1:
        check(case, start(config, tmp_path, *case.overrides))
        return
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", case.overrides).check(case.world)
    check(case, Outcome(2, f"{caught.value.label}: {caught.value}\n"))


@pytest.mark.parametrize(("case", "content"), FILES, ids=lambda value: getattr(value, "name", ""))
def test_config_file(case, content, tmp_path):
    file = tmp_path / "absent.yaml"
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    check(case, command_line(str(file)))


def test_no_config_at_all():
    check(Case("no argument", "CONFIG.yaml: is missing"), command_line())


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
