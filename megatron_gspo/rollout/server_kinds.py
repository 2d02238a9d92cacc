"""The engines that run in servers: what differs between them, by the name of `rollout.engine`
and of their section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gspo.rollout.server_engine.server_api import ServerAPI
from megatron_gspo.rollout.sglang import sglang_args, sglang_launch
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.sglang.sglang_weight_endpoints import SGLangWeightEndpoints
from megatron_gspo.rollout.vllm import vllm_launch
from megatron_gspo.rollout.vllm.vllm_api import VLLMAPI
from megatron_gspo.rollout.vllm.vllm_weight_endpoints import VLLMWeightEndpoints
from megatron_gspo.servers.package_launch import PackageLaunch
from megatron_gspo.weight_transport.server_endpoints import WeightEndpoints


@dataclass(frozen=True)
class ServerKind:
    """api, endpoints: of generation and of weights. launch: of started servers. on_cpu,
    gpus_per_server: of servers with some arguments. gpu_option: the argument that sets a server's
    first GPU, if there is one. config_option: the one whose JSON changes the model's config.
    length_options, memory_options: those that set the longest sequence and the size of the KV
    cache, for messages. adapter_args: (rank, names of the linear layers, arguments) -> further
    arguments of servers that get LoRA adapters alone."""

    api: ServerAPI
    endpoints: WeightEndpoints
    launch: type[PackageLaunch]
    on_cpu: Callable[[Sequence[str]], bool]
    gpus_per_server: Callable[[Sequence[str]], int]
    gpu_option: str | None
    config_option: str
    length_options: str
    memory_options: str
    adapter_args: Callable[[int, Sequence[str], Sequence[str]], list[str]]

    def quantized_args(self, quantization: Mapping[str, Any]) -> list[str]:
        """The arguments of a server whose model has this `quantization_config`, and no weights
        until the first update."""
        return [
            self.config_option,
            json.dumps({"quantization_config": quantization}),
            "--load-format",
            "dummy",
        ]


SERVER_KINDS = {
    "sglang": ServerKind(
        SGLangAPI(),
        SGLangWeightEndpoints(),
        sglang_launch.SGLangLaunch,
        sglang_launch.on_cpu,
        sglang_args.gpus_per_server,
        sglang_args.BASE_GPU,
        "--json-model-override-args",
        "--context-length",
        "--mem-fraction-static or --max-total-tokens",
        sglang_launch.adapter_args,
    ),
    "vllm": ServerKind(
        VLLMAPI(),
        VLLMWeightEndpoints(),
        vllm_launch.VLLMLaunch,
        vllm_launch.on_cpu,
        vllm_launch.gpus_per_server,
        None,
        "--hf-overrides",
        "--max-model-len",
        "--gpu-memory-utilization or --max-model-len",
        vllm_launch.adapter_args,
    ),
}
