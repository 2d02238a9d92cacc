"""Every config of examples/ can start on the processes that its header names; variants differ
in declared keys only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.family_pages.ready_configs import processes
from benchmarks.family_pages.rehearsed import read_rehearsals
from megatron_gspo.config import Config, load_config
from megatron_gspo.gpus import find_gpu
from megatron_gspo.models import family_of, read_config
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.servers.server_launch import first_server_gpu
from megatron_gspo.tools.plan.estimate import Choice, Estimator, Hardware
from megatron_gspo.tools.rehearse.build_only import Stage, build_stages
from tests.support.training_runs import tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(
    file
    for file in EXAMPLES.rglob("*.yaml")
    if re.search("^model:", file.read_text(), re.MULTILINE)
)
GRPO = [file for file in CONFIGS if file.stem.endswith("_grpo_r2")]
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def load(file: Path, tiny: str, folder: Path) -> Config:
    """The config with this machine's paths: sizes as shipped, six prompts, random weights. Adapters
    refuse these: their model directory has a file of weights that nothing reads."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(6))
    )
    data = yaml.safe_load(file.read_text())
    shipped = next(EXAMPLES.glob(f"*/models/{Path(data['model']['path']).name}"), tiny)
    if "lora" in data:
        shipped = shutil.copytree(shipped, folder / "model", dirs_exist_ok=True)
        (shipped / "model.safetensors").touch()
    overrides = [f"model.path={shipped}", f"run_dir={folder}/run"]
    overrides += [] if "lora" in data else ["model.init=random"]
    overrides += [
        f"data.{key}={prompts}" for key in ("prompts", "eval_prompts") if key in data["data"]
    ]
    if "distillation" in data:
        overrides.append(f"distillation.teacher={tiny}")
    for section in ("sglang", "agents"):
        if "python" in data.get(section, {}):
            overrides.append(f"{section}.python={sys.executable}")
    return load_config(file, overrides)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_can_start(file, tiny, tmp_path):
    config = load(file, tiny, tmp_path)
    config.check(processes(file))
    assert config.run_dir != load_config(file).run_dir


STARTS_SERVERS = [file for file in CONFIGS if "  num_servers:" in file.read_text()]


@pytest.mark.parametrize("file", STARTS_SERVERS, ids=lambda file: file.stem)
def test_the_servers_find_gpus_on_the_node_of_the_trainer(file):
    servers = load_config(file).servers
    launch = SERVER_KINDS[servers.section].launch
    gpus = processes(file)
    first = first_server_gpu(
        servers,
        launch.gpus_per_server(servers.server_args),
        trainer_gpus=gpus,
        visible_gpus=gpus,
        option_name=launch.gpu_option,
    )
    assert first == 0


def test_the_config_of_the_readme_can_start(tiny, tmp_path, monkeypatch):
    readme = (EXAMPLES.parent / "README.md").read_text()
    [config] = re.findall(r"```yaml\n(run_dir:.*?)```", readme, re.DOTALL)
    [reward] = re.findall(r"```python\n(def score.*?)```", readme, re.DOTALL)
    [processes_of_the_readme] = re.findall(r"torchrun --nproc-per-node (\d+) .* mine.yaml", readme)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(config)
    Path("verifier.py").write_text(reward)
    load(Path("mine.yaml"), tiny, tmp_path).check(int(processes_of_the_readme))


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values = {}
    for key, value in data.items():
        values |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return values


@pytest.mark.parametrize("file", GRPO, ids=lambda file: file.stem)
def test_variants_differ_only_where_the_algorithms_do(file):
    gspo = file.with_name(file.name.replace("_grpo_r2", "_gspo"))
    ours = flat(load_config(file).dump())
    theirs = flat(load_config(gspo).dump())
    different = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    clip = {
        "algorithm.epsilon_low",
        "algorithm.epsilon_high",
        "algorithm.importance_sampling_level",
    }
    assert different == {"run_dir", "algorithm.name", "routing.replay"} | clip
    assert processes(file) == processes(gspo)
    # As published.
    assert (ours["algorithm.epsilon_low"], ours["algorithm.epsilon_high"]) == (0.2, 0.27)
    if "tiny" not in file.name:
        assert (theirs["algorithm.epsilon_low"], theirs["algorithm.epsilon_high"]) == (3e-4, 4e-4)
        assert (
            load_config(gspo).rollout.sequences == 4 * load_config(gspo).training.global_batch_size
        )


WITH_MEMORY = [file for file in CONFIGS if "GiB weights" in file.read_text() and file not in GRPO]


def told_memory(file: Path) -> list[float]:
    """GiB of weights, gradients, optimizer, their sum, and activations, in a config's header."""
    header = " ".join(
        line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")
    )
    states = re.search(
        r"([\d.]+) GiB weights, ([\d.]+) gradients .*, ([\d.]+) optimizer \([^)]*\): ([\d.]+)\.",
        header,
    )
    activations = re.search(r"([\d.]+) of activations", header)
    return [float(word) for word in (*states.groups(), activations[1])]


@pytest.mark.parametrize("file", WITH_MEMORY, ids=lambda file: file.stem)
def test_the_header_has_the_memory_of_the_layout(file, tiny, tmp_path):
    """As the plan's coarse formulas have it; adapters' gradients and optimizer, below 2 GiB,
    they leave out.
    """
    config = load(file, tiny, tmp_path)
    _, shape = family_of(read_config(config.model.path))
    estimator = Estimator(shape, config, Hardware(find_gpu("h100"), processes(file), 1.0, 1.0))
    recompute = config.model.recompute_granularity
    tokens = config.training.max_tokens_per_micro_batch
    estimate = estimator.estimate(Choice(config.parallel, recompute, tokens))
    weights, gradients, optimizer, total, activations = told_memory(file)
    assert total == pytest.approx(weights + gradients + optimizer, abs=0.11)
    assert weights == pytest.approx(estimate.weights / GIB, rel=0.09)
    assert gradients == pytest.approx(estimate.gradients / GIB, rel=0.09, abs=0.5)
    assert optimizer == pytest.approx(estimate.optimizer / GIB, rel=0.05, abs=1.3)
    assert activations == pytest.approx(estimate.activations / GIB, rel=0.25)
    if rehearsed := read_rehearsals().get(file.stem):
        of_peak = rehearsed.figures.state_bytes / GIB
        # The rank with the highest peak may be of a stage with fewer parameters and more
        # micro-batches under way.
        assert of_peak < total + 0.3
        if config.parallel.pipeline_model_parallel_size == 1:
            assert of_peak == pytest.approx(total, abs=0.3)


def check_header(file: Path, config: Config, stages: list[Stage]) -> None:
    """The header has the weights, float32 gradients and sharded optimizer of the fullest stage."""
    parallel = config.parallel
    ranks = processes(file) // parallel.pipeline_model_parallel_size
    experts = ranks // (parallel.expert_model_parallel_size * parallel.expert_tensor_size)
    dense = ranks // parallel.tensor_model_parallel_size
    states = []
    for stage in stages:
        trained = stage.parameters - stage.frozen_parameters
        rest = trained - stage.expert_parameters
        optimizer = 12 * (stage.expert_parameters / experts + rest / dense)
        states.append([2 * stage.parameters, 4 * trained, optimizer])
    fullest = max(states, key=sum)
    assert told_memory(file)[:3] == pytest.approx([size / GIB for size in fullest], abs=0.06)


@pytest.mark.parametrize(
    "file", [file for file in CONFIGS if file not in GRPO], ids=lambda file: file.stem
)
def test_every_stage_is_built(file, tiny, tmp_path):
    """Every stage's model is built on the meta device in the full world; all stages together
    hold the whole model.
    """
    config = load(file, tiny, tmp_path)
    stages = build_stages(config, processes(file))
    _, shape = family_of(read_config(config.model.path))
    assert sum(stage.layers for stage in stages) == shape.num_layers
    experts = (
        sum(stage.expert_parameters for stage in stages)
        * config.parallel.expert_model_parallel_size
    )
    moe_layers = sum(shape.moe_layers)
    hidden = shape.hidden_size
    width = shape.moe_ffn_hidden_size
    biases = (2 * width + hidden) * shape.linear_bias
    assert experts == moe_layers * shape.num_experts * (
        shape.mlp_matrices * hidden * width + biases
    )
    if file in WITH_MEMORY and not config.lora.is_on:
        check_header(file, config, stages)
