"""Known defects of the installed packages that this machine, layout and config meet, and what handles each."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from megatron_gspo.config import Config
from megatron_gspo.patches.defects import Defect, Situation, applicable, missing
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok
from megatron_gspo.tools.doctor.version_checks import numbers


def situation(
    versions: Mapping[str, str | None],
    config: Config | None,
    hf: Mapping[str, Any],
    *,
    world_size: int,
    sglang: tuple[int, ...] = (),
    servers_on_cpu: bool = False,
) -> Situation:
    """What decides which defects are met. hf: the model's config.json, {} where it can't be read."""
    gpu = torch.cuda.is_available()
    engine = gpu and importlib.util.find_spec("transformer_engine") is not None
    common: dict[str, Any] = dict(
        megatron=numbers(versions.get("megatron-core")),
        sglang=sglang,
        gpu=gpu,
        apex=versions.get("apex") is not None,
        world_size=world_size,
        servers_on_cpu=servers_on_cpu,
    )
    if config is None:
        return Situation(**common, transformer_engine=engine, gloo=not gpu)
    parallel = config.parallel
    has_experts = bool(hf.get("num_experts") or hf.get("num_local_experts"))
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
        has_dense_layers=bool(hf.get("mlp_only_layers")) or hf.get("decoder_sparse_step", 1) != 1 or not has_experts,
        replay=config.routing.replay != "none",
        has_config=True,
        starts_servers=bool(config.sglang.num_servers),
    )


def check_defects(found: Situation) -> list[Finding]:
    """A note for each defect that is met and handled; an error where its patch isn't in place in this process."""
    import megatron_gspo.mcore  # noqa: F401 (applies the patches)

    met = applicable(found)
    if not met:
        return [ok("defects.known", "none of the known defects of the installed packages is met")]
    return [judge_defect(defect, missing(defect)) for defect in met]


def judge_defect(defect: Defect, untouched: list[str]) -> Finding:
    """untouched: the upstream functions that the patch should have replaced and hasn't."""
    place = defect.place.replace("`", "")
    file = place.partition(":")[0].partition(" ")[0]
    folder = "" if "/" in file and not file.startswith("sglang_on_cpu") or file == "setup.py" else "patches/"
    check = f"defects.{file.rpartition('/')[2].removesuffix('.py')}"
    package = (
        "" if defect.range is None else defect.versions.split(" without ")[0].split(" with ")[0].split(" on a ")[0]
    )
    what = f"{package + ': ' if package else ''}{defect.what}"
    if untouched:
        return error(
            check,
            what,
            f"{folder}{file} is not in place: {untouched[0]} is upstream's",
            "import megatron_gspo.mcore before anything imports megatron.core",
        )
    return note(check, what, f"handled by {folder}{place}")
