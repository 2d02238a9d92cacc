"""Checks of the model directory and of the config against its config.json.

Each raises ConfigError.
"""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.config.config_error import ConfigError, show
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.model_sections import ModelConfig
from megatron_gspo.config.rollout_sections import RolloutConfig, RoutingConfig
from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.megatron_folders import iteration_folder
from megatron_gspo.models.model_shape import (
    ModelError,
    check_sizes,
    experts_of,
    language_config,
    read_json,
)


def read_hf_config(path: str | Path, key: str = "model.path") -> HFConfig:
    """config.json of a Hugging Face model directory, as `read_config` has it."""
    file = Path(path) / "config.json"
    if not file.is_file():
        problem = "has no config.json" if Path(path).is_dir() else "is not a directory"
        fix = "give a local Hugging Face model directory (hf download MODEL --local-dir DIR)"
        raise ConfigError(key, str(path), problem, fix)
    try:
        content = read_json(file)
    except ModelError:
        problem = "its config.json is not a JSON object"
        raise ConfigError(key, str(path), problem, "download it again") from None
    try:
        return language_config(content)
    except ModelError as error:
        raise ConfigError(key, str(path), str(error), "download it again") from None


def check_family(key: str, path: str, hf: HFConfig) -> None:
    """The model of a key belongs to a supported family and its sizes are plausible.

    hf: its config.json.
    """
    from megatron_gspo.models.families import FAMILIES  # imports torch

    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        problem = f"its config.json has model_type {show(model_type)}"
        raise ConfigError(key, path, problem, f"use one of {', '.join(FAMILIES)}")
    try:
        check_sizes(hf)
    except ModelError as error:
        raise ConfigError(key, path, str(error), "download it again") from None


def check_critic_model(path: str, critic: HFConfig, policy: HFConfig) -> None:
    """The value model reads the policy's tokens.

    Args:
        critic, policy: their config.json.
    """
    for name, words in (("vocab_size", "a vocabulary"), ("max_position_embeddings", "positions")):
        if (value := critic.get(name)) is not None and value < policy.get(name, 0):
            problem = f"has {words} of {value}, the policy of {policy[name]}"
            raise ConfigError(
                "critic.path", path, problem, "use a model with the policy's tokenizer and length"
            )


def check_experts(routing: RoutingConfig, hf: HFConfig) -> None:
    """A model without experts has no routes, and a perturbation needs softmax routers.

    hf: its config.json.
    """
    if experts_of(hf):
        if routing.perturbation is not None and _router_score(hf) != "softmax":
            problem = (
                f"the routers of {hf['model_type']} add a bias to sigmoids; a perturbation is"
                " defined for softmax routers"
            )
            raise ConfigError(
                "routing.perturbation", routing.perturbation, problem, "remove the key"
            )
        return
    for key, fix in (
        ("replay", "set it to none"),
        ("compare_rollout", "set it to false"),
        ("perturbation", "remove the key"),
    ):
        if (value := getattr(routing, key)) != default_of(RoutingConfig, key):
            raise ConfigError(f"routing.{key}", value, "the model has no experts", fix)


def _router_score(hf: HFConfig) -> str:
    """How the routers score an expert: ``softmax`` or ``sigmoid``."""
    from megatron_gspo.models.families import family_of  # imports torch

    try:
        _, shape = family_of(hf)
    except ModelError:  # has a message of its own
        return "softmax"
    return shape.router.score


def check_positions(rollout: RolloutConfig, max_prompt_length: int, hf: HFConfig) -> None:
    """The longest prompt and response fit the model's positions. hf: its config.json."""
    longest = max_prompt_length + rollout.max_response_length
    limit = hf.get("max_position_embeddings")
    if limit is not None and longest > limit:
        problem = (
            f"with data.max_prompt_length it makes {longest} tokens and the model has {limit}"
            " positions"
        )
        value = rollout.max_response_length
        raise ConfigError(
            "rollout.max_response_length", value, problem, f"keep the sum within {limit}"
        )


def check_context(key: str, tokens: int, hf: HFConfig) -> None:
    """So many tokens fit the model's positions. hf: its config.json."""
    limit = hf.get("max_position_embeddings")
    if limit is not None and tokens > limit:
        raise ConfigError(key, tokens, f"the model has {limit} positions", f"set at most {limit}")


def check_megatron_path(model: ModelConfig) -> None:
    """The folder of a distributed checkpoint is there, if one is named."""
    if model.megatron_path is None:
        return
    key = "model.megatron_path"
    if model.init == "random":
        problem = "model.init: random draws the weights"
        raise ConfigError(key, model.megatron_path, problem, "remove one of the two keys")
    try:
        iteration_folder(model.megatron_path)
    except ModelError as error:
        problem, _, fix = str(error).partition("; ")
        raise ConfigError(key, model.megatron_path, problem, fix) from None


def check_weight_files(key: str, path: str, *, are_read: bool) -> None:
    """The directory has safetensors weights, if they are read, and files beside them that an
    export can hold.
    """
    from megatron_gspo.models.companions import companions  # imports torch

    weights = Path(path)
    try:
        companions(weights)
    except ModelError as error:
        raise ConfigError(key, path, "can't be exported", str(error)) from None
    if are_read and not any(weights.glob("*.safetensors")):
        problem = "has no *.safetensors weights"
        fix = "download them, or set model.init: random"
        if any(weights.glob("*.bin")):
            problem += ", only pickled ones (*.bin), which could run code when loaded"
            fix = "load the model with Transformers and save_pretrained it"
        raise ConfigError(key, path, problem, fix)
