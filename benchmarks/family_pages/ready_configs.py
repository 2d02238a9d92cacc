"""The ready configs of examples/: what their keys and headers say of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.family_pages.facts import EXAMPLES
from megatron_gspo.config import Config, load_config
from megatron_gspo.gpus import GPUS, Gpu

_PROCESSES = re.compile(r"^# processes: (\d+)$", re.MULTILINE)


def processes(file: Path) -> int:
    """The number of training GPUs in a config's header."""
    found = _PROCESSES.search(file.read_text(encoding="utf-8"))
    assert found is not None, f"{file}: its header has no line `# processes: N`"
    return int(found[1])


@dataclass(frozen=True)
class ReadyConfig:
    """A config of a published model. world: training GPUs; command: as its header has it."""

    file: Path
    config: Config
    world: int
    gpu: Gpu
    command: str

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def model(self) -> str:
        """The name of the model's folder."""
        return Path(self.config.model.path or "").name

    @property
    def memory(self) -> str:
        """Of a GPU, as it is sold."""
        return "141 GB" if self.gpu.name == "h200" else "80 GB"

    @property
    def servers(self) -> str:
        """Where they run."""
        nodes = re.search(r"\bSERVER_NODES=(\d+)", self.command)
        if nodes:
            return f"{int(nodes[1]) * self.gpu.node} GPUs"
        return "the same GPUs" if self.config.servers.colocated else "other GPUs"


def read_ready_config(file: Path) -> ReadyConfig:
    """Of a file in examples/ whose model is published."""
    lines = file.read_text(encoding="utf-8").splitlines()
    command = []
    for line in lines[1:]:
        if not line.startswith("#   "):
            break
        command.append(line.removeprefix("#   "))
    gpu = GPUS["h200" if "141gb" in file.stem else "h100"]
    return ReadyConfig(file, load_config(file), processes(file), gpu, "\n".join(command))


def ready_configs() -> list[ReadyConfig]:
    """All whose model is in ``examples/*/models``, but variants that differ in the objective or in
    the kind of server alone. By model, the fewest GPUs first.
    """
    published = {folder.name for folder in EXAMPLES.glob("*/models/*")}
    files = [
        file
        for file in sorted(EXAMPLES.glob("*/*.yaml"))
        if _PROCESSES.search(file.read_text(encoding="utf-8"))
        and not file.stem.endswith("_grpo_r2")
        and not file.stem.startswith("vllm_")
    ]
    configs = [config for config in map(read_ready_config, files) if config.model in published]
    return sorted(configs, key=lambda config: (config.world, config.memory, config.name))
