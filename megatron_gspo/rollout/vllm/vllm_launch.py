"""How a vLLM server is started on this node: command line, environment, reasons of its exit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from megatron_gspo.errors import InputError
from megatron_gspo.rollout.vllm.vllm_api import EXTENSION
from megatron_gspo.servers.http_client import SERVER_KEEP_ALIVE
from megatron_gspo.servers.server_launch import (
    ServerLaunch,
    product_of_sizes,
    server_environment,
)
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER

EXTENSION_FOLDER = Path(__file__).resolve().parent / "worker_extension"
# See `ServerLaunch.exit_causes`; from the logs of vllm 0.32.0
_EXIT_CAUSES = (
    (
        r"unrecognized arguments|error: (argument|ambiguous option|the following arguments)",
        "vllm refused its arguments; correct vllm.server_args",
    ),
    (
        r"^(ModuleNotFoundError|\S+): No module named",
        "its vllm is incomplete; install it or name another interpreter in vllm.python",
    ),
    (
        (
            r"out of memory|OutOfMemoryError|MemoryError|can(no|')t allocate memory|No available"
            r" memory for the cache"
        ),
        "it ran out of memory; lower --gpu-memory-utilization or --max-num-seqs",
    ),
    (
        r"Unsupported CPU attention configuration",
        (
            "vllm's attention on a CPU does not support the model's head_dim; use a GPU or another"
            " model"
        ),
    ),
    (
        (
            r"Unrecognized model in|Can't load.*config|Cannot find any model weights|Repo id must"
            r" be|SafetensorError"
        ),
        "its model can't be loaded; check the model path",
    ),
)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's --max-lora-rank takes no others
_ON_CPU = {  # unless set
    "VLLM_TARGET_DEVICE": "cpu",  # a build for GPUs looks for one
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class VLLMLaunch(ServerLaunch):
    """`ServerLaunch` of vLLM servers."""

    engine: ClassVar[str] = "vllm"
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    reserved: ClassVar[Mapping[str, str]] = {
        "--port": "vllm.port",
        "--api-key": "vllm.api_key_file",
        "--worker-extension-cls": "vllm.weight_transport",
    }
    exit_causes: ClassVar[tuple[tuple[str, str], ...]] = _EXIT_CAUSES
    config_option: ClassVar[str] = "--hf-overrides"
    length_options: ClassVar[str] = "--max-model-len"
    memory_options: ClassVar[str] = "--gpu-memory-utilization or --max-model-len"

    @staticmethod
    def on_cpu(args: Sequence[str]) -> bool:
        """See `ServerLaunch.on_cpu`: vLLM takes the device of its build, so a CPU if torch finds
        no GPU.
        """
        return not torch.cuda.is_available()

    @staticmethod
    def gpus_per_server(args: Sequence[str]) -> int:
        """See `ServerLaunch.gpus_per_server`."""
        sizes = [
            ("--tensor-parallel-size", "-tp"),
            ("--pipeline-parallel-size", "-pp"),
            ("--data-parallel-size", "-dp"),
        ]
        return product_of_sizes(args, sizes, "vllm")

    @classmethod
    def adapter_args(cls, rank: int, targets: Sequence[str], args: Sequence[str]) -> list[str]:
        """See `ServerLaunch.adapter_args`."""
        largest = next((size for size in _LORA_RANKS if size >= rank), rank)
        made = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(largest)]
        return [*made, "--lora-target-modules", *targets]

    def check(self) -> None:
        """See `ServerLaunch.check`. On a CPU /sleep answers and frees nothing."""
        super().check()
        if self.config.colocated and self.on_cpu(self.args):
            raise InputError("vllm.colocated=true: vLLM frees no memory on a CPU; set it to false")

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """See `ServerLaunch.command`."""
        command = [
            self.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            self.model_path,
        ]
        command += [
            "--host",
            self.host,
            "--port",
            str(port),
            "--dtype",
            self.dtype,
            "--enable-scale-out",
        ]
        command += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
        command += ["--generation-config", "vllm"]  # else the model's own sampling parameters
        command += ["--disable-uvicorn-access-log", "--worker-extension-cls", EXTENSION]
        if self.routed_experts:
            command.append("--enable-return-routed-experts")
        if self.on_cpu(self.args):
            command.append("--enforce-eager")  # compiling takes minutes
        elif self.config.colocated:
            command.append("--enable-sleep-mode")
        if key_file:
            command += ["--config", key_file]
        return command + list(self.args)

    def environment(self, index: int) -> dict[str, str]:
        """See `ServerLaunch.environment`: without a GPU option, a server gets its GPUs as the
        visible ones.
        """
        environment = server_environment(self.python, host=self.host)
        folders = [
            str(RECEIVER_FOLDER),
            str(EXTENSION_FOLDER),
            *filter(None, [environment.get("PYTHONPATH")]),
        ]
        environment |= {
            "PYTHONPATH": os.pathsep.join(folders),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE),
        }
        if "--enable-lora" in self.args:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.on_cpu(self.args):
            return {**_ON_CPU, **environment, "OMP_NUM_THREADS": "1"}
        size = self.gpus_per_server(self.args)
        first = (self.first_gpu or 0) + index * size
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        visible = listed.split(",") if listed else [str(gpu) for gpu in range(first + size)]
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + size])}
