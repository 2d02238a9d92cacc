"""The engines that run in servers, by the name of `rollout.engine` and of their section."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.rollout.server_engine.server_api import ServerAPI
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.rollout.vllm.vllm_api import VLLMAPI
from megatron_gspo.rollout.vllm.vllm_launch import VLLMLaunch
from megatron_gspo.servers.server_launch import ServerLaunch


@dataclass(frozen=True)
class ServerKind:
    """What differs between engines."""

    api: ServerAPI
    """Endpoints and messages of its servers."""

    launch: type[ServerLaunch]
    """How its servers are started."""


SERVER_KINDS = {
    "sglang": ServerKind(
        api=SGLangAPI(),
        launch=SGLangLaunch,
    ),
    "vllm": ServerKind(
        api=VLLMAPI(),
        launch=VLLMLaunch,
    ),
}
