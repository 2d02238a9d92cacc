"""Checks of the `lora` section. Each raises ConfigError."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config.config_error import ConfigError
from megatron_gspo.config.lora_section import LoRAConfig
from megatron_gspo.config.model_sections import ModelConfig
from megatron_gspo.config.rollout_sections import RolloutConfig
from megatron_gspo.config.server_sections import ServerConfig
from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.model_shape import ModelError


def check_lora(lora: LoRAConfig, model: ModelConfig) -> None:
    """What adapters don't go with."""
    if lora.dropout:
        problem = (
            "old and new log-probs would be of different random models, and the ratio of an"
            " unchanged one not 1"
        )
        raise ConfigError("lora.dropout", lora.dropout, problem, "set it to 0")
    if not lora.is_on:
        if lora.adapter_path is not None:
            raise ConfigError(
                "lora.rank", 0, "lora.adapter_path has adapters", "set it to their rank"
            )
        return
    for key, value, allowed, problem in (
        (
            "model.implementation",
            model.implementation,
            ("auto", "torch"),
            "adapters are of torch layers",
        ),
        (
            "model.init",
            model.init,
            ("pretrained",),
            "adapters need a checkpoint's weights, which stay as they are",
        ),
        (
            "model.expert_bias_update_rate",
            model.expert_bias_update_rate,
            (0.0,),
            "with lora.rank the base is frozen",
        ),
    ):
        if value not in allowed:
            raise ConfigError(key, value, problem, f"set it to {allowed[-1]}")


def check_adapter_updates(lora: LoRAConfig, rollout: RolloutConfig, servers: ServerConfig) -> None:
    """What updates of the adapters alone need."""
    if not lora.sends_adapters:
        return
    key = "lora.weight_updates"
    updates = lora.weight_updates
    if not lora.is_on:
        raise ConfigError(key, updates, "lora.rank is 0: there are no adapters", "set it to merged")
    if rollout.engine == "embedded":
        raise ConfigError(key, updates, "the embedded engine has no adapters", "set it to merged")
    if rollout.quantization.is_on:
        problem = (
            "rollout.quantization quantises the weights of each update, and the base is not sent"
        )
        raise ConfigError(key, updates, problem, "set it to merged")
    if servers.weight_transport not in servers.adapter_transports:
        problem = (
            f"{servers.section}.weight_transport is {servers.weight_transport}, which adapters"
            " alone don't have"
        )
        raise ConfigError(
            key,
            updates,
            problem,
            f"set {servers.section}.weight_transport to {' or '.join(servers.adapter_transports)}",
        )
    if servers.weight_checksums:
        problem = (
            f"{servers.section}.weight_checksums sets the weights to zero, and the base is not sent"
        )
        raise ConfigError(key, updates, problem, f"set {servers.section}.weight_checksums to false")


def check_adapter_files(lora: LoRAConfig) -> None:
    """The adapters to start from are there."""
    if (
        lora.adapter_path is not None
        and not (Path(lora.adapter_path) / "adapter_config.json").is_file()
    ):
        problem = "has no adapter_config.json"
        raise ConfigError(
            "lora.adapter_path", lora.adapter_path, problem, "give a PEFT directory, or null"
        )


def check_targets(lora: LoRAConfig, hf: HFConfig) -> None:
    """The model has linear layers of these names. hf: its config.json."""
    if not lora.is_on or lora.targets is None:
        return
    # These import torch, which a config is read without.
    from megatron_gspo.models.adapter_rules import linear_names, router_names
    from megatron_gspo.models.families import family_of

    try:
        family, shape = family_of(hf)
    except ModelError:  # has a message of its own
        return
    routers = router_names(family, shape)
    known = linear_names(family, shape) + routers
    for name in lora.targets:
        if name not in known:
            problem = f"{name} is no linear layer of the model that can have an adapter"
            raise ConfigError(
                "lora.targets", list(lora.targets), problem, f"use some of {', '.join(known)}"
            )
    if not lora.targets:
        raise ConfigError(
            "lora.targets", [], "no layer has an adapter", f"use some of {', '.join(known)}"
        )
    if lora.sends_adapters and (named := [name for name in lora.targets if name in routers]):
        problem = f"servers can't add an adapter to {named[0]}, the router"
        fix = "leave it out, or set lora.weight_updates to merged"
        raise ConfigError("lora.targets", list(lora.targets), problem, fix)
