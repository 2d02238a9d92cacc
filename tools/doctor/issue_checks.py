"""Known issues of the installed packages that apply to this machine, layout and config, and
what handles each.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron_gspo.config import Config
from megatron_gspo.models.model_shape import experts_of
from megatron_gspo.patches.issue import KnownIssue, Situation
from megatron_gspo.patches.known_issues import applicable
from megatron_gspo.tools.doctor.findings import Finding, error, note, ok
from megatron_gspo.tools.doctor.version_checks import numbers


def situation(
    versions: Mapping[str, str | None],
    config: Config | None,
    hf: Mapping[str, Any],
    *,
    world_size: int,
    sglang: tuple[int, ...] = (),
    vllm: tuple[int, ...] = (),
    servers_on_cpu: bool = False,
) -> Situation:
    """What decides which issues apply. hf: the model's config.json, {} if it can't be read."""
    gpu = torch.cuda.is_available()
    engine = gpu and importlib.util.find_spec("transformer_engine") is not None
    common: dict[str, Any] = dict(
        megatron=numbers(versions.get("megatron-core")),
        sglang=sglang,
        vllm=vllm,
        gpu=gpu,
        apex=gpu and versions.get("apex") is not None,
        world_size=world_size,
        servers_on_cpu=servers_on_cpu,
    )
    if config is None:
        return Situation(**common, transformer_engine=engine, gloo=not gpu)
    parallel = config.parallel
    has_experts = experts_of(hf) is not None
    return Situation(
        **common,
        transformer_engine=engine and config.model.implementation != "torch",
        gloo=parallel.backend == "gloo" or (parallel.backend == "auto" and not gpu),
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size or 1,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_size,
        has_experts=has_experts,
        replay=config.routing.replay != "none",
        has_config=True,
        starts_servers=bool(config.servers.num_servers),
    )


def check_issues(found: Situation) -> list[Finding]:
    """A note for each issue that applies and is handled; an error if its patch is not active in
    this process.
    """
    import megatron_gspo.mcore  # noqa: F401 (applies the patches)

    issues = applicable(found)
    if not issues:
        return [ok("known_issues.all", "no known issue of the installed packages applies")]
    return [judge_issue(issue, issue.unpatched()) for issue in issues]


def judge_issue(issue: KnownIssue, unpatched: list[str]) -> Finding:
    """unpatched: the upstream functions that the patch should have replaced."""
    handled_by = issue.handled_by.replace("`", "")
    file = handled_by.partition(":")[0].partition(" ")[0]
    folder = (
        "patches/"
        if "/" not in file and file != "setup.py" or file.startswith("sglang_on_cpu")
        else ""
    )
    check = f"known_issues.{file.rpartition('/')[2].removesuffix('.py')}"
    package = (
        "" if issue.range is None else re.split(" without | with | on a ", issue.versions)[0] + ": "
    )
    what = package + issue.problem.replace("`", "")
    if unpatched:
        return error(
            check,
            what,
            f"{folder}{file} is not active: {unpatched[0]} is upstream's",
            "import megatron_gspo.mcore before anything imports megatron.core",
        )
    return note(check, what, f"handled by {folder}{handled_by}")
