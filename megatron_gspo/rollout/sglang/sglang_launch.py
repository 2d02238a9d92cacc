"""How an SGLang server is started on this node: command line, environment, reasons of its exit.

sglang itself is never imported: the servers have an interpreter of their own.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

import megatron_gspo
from megatron_gspo.errors import InputError
from megatron_gspo.servers.http_client import SERVER_KEEP_ALIVE
from megatron_gspo.servers.server_launch import (
    ServerLaunch,
    option,
    product_of_sizes,
    server_environment,
)
from megatron_gspo.weight_transport.receiver_transport import RECEIVER_FOLDER
from megatron_gspo.weight_transport.server_endpoints import RECEIVER

_CPU_OVERLAP_VERSION = (0, 5, 23)  # earlier versions overwrite routed experts while they are copied
_FREEZE_SECONDS = 2.0  # timeout of /freeze_gc
# See `ServerLaunch.exit_causes`; from the logs of sglang 0.5.15 and 0.5.23
_EXIT_CAUSES = (
    (
        r"unrecognized arguments|error: (argument|ambiguous option|the following arguments)",
        "sglang refused its arguments; correct sglang.server_args",
    ),
    (
        r"attention backends are supported for deterministic inference",
        (
            "sglang has no deterministic attention of this kind, and none without a GPU; take one"
            " of those with --attention-backend, or leave out --enable-deterministic-inference"
        ),
    ),
    (
        r"^(ModuleNotFoundError|\S+): No module named",
        "its sglang is incomplete; install it or name another interpreter in sglang.python",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|MemoryError|can(no|')t allocate memory",
        "it ran out of memory; lower --mem-fraction-static or --max-total-tokens",
    ),
    (
        r"is not a local folder|does not appear to have a file|Unrecognized model in|Can't"
        r" load.*config|"
        r"Error no file named|Cannot find any model weights|Repo id must be|SafetensorError",
        "its model can't be loaded; check the model path",
    ),
)


@dataclass(frozen=True)
class SGLangLaunch(ServerLaunch):
    """`ServerLaunch` of SGLang servers.

    `--device cpu` uses no GPU; `--base-gpu-id` is `first_gpu` if that is None.
    """

    engine: ClassVar[str] = "sglang"
    packages: ClassVar[tuple[str, ...]] = ("sglang",)
    reserved: ClassVar[Mapping[str, str]] = {
        "--port": "sglang.port",
        "--api-key": "sglang.api_key_file",
        "--custom-weight-loader": "sglang.weight_transport",
        "--preferred-sampling-params": "rollout.temperature",
    }
    exit_causes: ClassVar[tuple[tuple[str, str], ...]] = _EXIT_CAUSES
    gpu_option: ClassVar[str] = "--base-gpu-id"
    config_option: ClassVar[str] = "--json-model-override-args"
    length_options: ClassVar[str] = "--context-length"
    memory_options: ClassVar[str] = "--mem-fraction-static or --max-total-tokens"

    @staticmethod
    def on_cpu(args: Sequence[str]) -> bool:
        """See `ServerLaunch.on_cpu`: by `--device`, else if torch finds no GPU."""
        if device := option(args, "--device"):
            return device == "cpu"
        return not torch.cuda.is_available()

    @staticmethod
    def gpus_per_server(args: Sequence[str]) -> int:
        """See `ServerLaunch.gpus_per_server`."""
        sizes = [
            ("--tp-size", "--tensor-parallel-size", "--tp"),
            ("--pp-size", "--pipeline-parallel-size", "--pp"),
        ]
        # With it, data-parallel ranks share the tensor-parallel GPUs.
        if "--enable-dp-attention" not in args:
            sizes.append(("--dp-size", "--data-parallel-size", "--dp"))
        return product_of_sizes(args, sizes, "sglang")

    @classmethod
    def adapter_args(cls, rank: int, targets: Sequence[str], args: Sequence[str]) -> list[str]:
        """See `ServerLaunch.adapter_args`."""
        arguments = ["--enable-lora", "--max-loras-per-batch", "1", "--max-lora-rank", str(rank)]
        if cls.on_cpu(args):
            arguments += ["--lora-backend", "torch_native"]  # the others are written in Triton
        return [*arguments, "--lora-target-modules", *targets]

    @cached_property
    def cpu(self) -> bool:
        """Whether the servers run without a GPU."""
        return self.on_cpu(self.args)

    def command(self, index: int, port: int, *, key_file: str | None) -> list[str]:
        """See `ServerLaunch.command`."""
        command = [self.python, "-m", "sglang.launch_server", "--model-path", self.model_path]
        command += ["--host", self.host, "--port", str(port), "--dtype", self.dtype]
        command += ["--log-level-http", "warning"]  # the default logs a line per request
        command += ["--custom-weight-loader", RECEIVER]
        if self.routed_experts:
            command.append("--enable-return-routed-experts")
        if self.cpu:
            command += ["--device", "cpu", "--attention-backend", "torch_native"]
            # Without a limit on tokens the cache takes most of the memory.
            command += ["--max-total-tokens", "8192"]
            # Without sleep an idle server uses a core.
            command += ["--sleep-on-idle", "--skip-server-warmup"]
            if self.version < _CPU_OVERLAP_VERSION:
                command.append("--disable-overlap-schedule")
        elif self.config.colocated:
            command.append("--enable-memory-saver")  # without it a server keeps its memory
        if key_file:
            command += ["--config", key_file]
        command += self.args
        if not self.cpu:
            command += [self.gpu_option, str(self._first_gpu(index))]
        return command

    def _first_gpu(self, index: int) -> int:
        """The first GPU of server `index`."""
        first = self.first_gpu
        if first is None:
            first = int(option(self.args, self.gpu_option) or 0)
        return first + index * self.gpus_per_server(self.args)

    def environment(self, index: int) -> dict[str, str]:
        """See `ServerLaunch.environment`: the same for all servers, with our receiver of weights
        and what servers without a GPU need.
        """
        environment = server_environment(self.python, host=self.host)
        paths = [str(RECEIVER_FOLDER)]
        if environment.get("PYTHONPATH"):
            paths.append(environment["PYTHONPATH"])
        if self.cpu:
            paths.insert(0, patch_folder())
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        return environment | {
            "PYTHONPATH": os.pathsep.join(paths),
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE),
        }

    def after_start(self, url: str, api_key: str | None) -> None:
        """Exclude what the server has loaded from its garbage collections.

        SGLang does so itself after its warm-up, which servers on a CPU skip. Each flush of the
        cache, and so each weight update, runs a collection, which takes 0.4 s otherwise.
        """
        if self.cpu:
            _freeze_gc(url, api_key)


def patch_folder() -> str:
    """Directory of the start-up hook for servers without a GPU, in a checkout or an
    installation.
    """
    for root in megatron_gspo.__path__:
        folder = Path(root) / "patches" / "sglang_on_cpu"
        if (folder / "sitecustomize.py").is_file():
            return str(folder.resolve())
    raise InputError(
        "patches/sglang_on_cpu is missing from this installation of megatron-gspo: install it again"
    )


def _freeze_gc(url: str, api_key: str | None) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_FREEZE_SECONDS)
    try:
        connection.request(
            "POST", "/freeze_gc", headers={"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        pass  # later collections take longer
    finally:
        connection.close()
