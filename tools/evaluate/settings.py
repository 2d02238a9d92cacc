"""The config of an evaluation: a run's own, or defaults for a model directory, with the user's
overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.config.load import apply_overrides, read_file
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.evaluate.targets import is_run, server_urls

_ROLLOUT = (
    "engine",
    "max_response_length",
    "max_batch_size",
    "environment",
    "environment_options",
    "max_turns",
    "max_turn_length",
)
_CLIENT = (
    "api_key_file",
    "max_concurrent_requests",
    "request_timeout",
    "retries",
    "response_timeout",
    "recovery_timeout",
)
_STARTED = ("num_servers", "python", "port", "server_args", "start_timeout")


def evaluation_config(
    target: str,
    tasks: Sequence[Path],
    output: Path,
    overrides: Sequence[str] = (),
    server_args: Mapping[str, Sequence[str]] | None = None,
) -> Config:
    """The config of evaluating `target`. tasks: files in place of a run's own held-out prompts.

    Of a run's config it has what generation, verifier and servers need; servers of the run itself
    are never used, they may hold other weights. Raises ConfigError.
    """
    run = read_file(Path(target) / "config.yaml") if is_run(target) else {}
    urls = server_urls(target)
    given = apply_overrides({}, overrides)
    engine = given.get("rollout", {}).get("engine") or _engine(run, bool(urls))
    data: dict[str, Any] = {
        **{key: run[key] for key in ("seed", "data", "agents", "evaluation") if key in run},
        "run_dir": str(output),
        "model": {"path": target} | _part(run, "model", ("path", "dtype")),
        "rollout": _part(run, "rollout", _ROLLOUT) | {"engine": engine, "rollout_batch_size": 1},
        "training": {
            "steps": 1,
            "global_batch_size": 1,
            # A run of an agent is no longer than in training.
            **_part(run, "training", ("max_tokens_per_micro_batch",)),
        },
    }
    if engine in SERVER_KINDS:
        section = _part(run, engine, _CLIENT if urls else (*_CLIENT, *_STARTED))
        own = {
            "num_servers": section.get("num_servers") or 1,
            "server_args": [*section.get("server_args", []), *(server_args or {}).get(engine, ())],
        }
        data[engine] = section | ({"urls": list(urls)} if urls else own)
    if "verifier" in given.get("data", {}):  # for this evaluation, unlike that of the run
        data["evaluation"] = {
            key: value
            for key, value in data.get("evaluation", {}).items()
            if not key.startswith("verifier")
        }
    if tasks:
        data["data"] = data.get("data", {}) | {
            "task": None,
            "sources": [],
            "prompts": str(tasks[0]),
            "eval_prompts": str(tasks[0]),
        }
        for section in (data["data"], data.get("evaluation", {})):
            if section.get("verifier") == "reasoning_gym":  # of the run's task
                section["verifier"] = None
    return Config.from_dict(apply_overrides(data, overrides))


def given_keys(overrides: Sequence[str]) -> set[str]:
    """The keys that overrides set."""
    return {override.partition("=")[0] for override in overrides}


def _engine(run: dict[str, Any], served: bool) -> str:
    """Default of `rollout.engine`: the run's; `sft` samples held-out responses from the
    embedded engine.
    """
    engine = run.get("rollout", {}).get("engine", "embedded")
    if served and engine not in SERVER_KINDS:
        return next(iter(SERVER_KINDS))
    return "embedded" if engine == "sft" else engine


def _part(run: dict[str, Any], section: str, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in run.get(section, {}).items() if key in keys}
