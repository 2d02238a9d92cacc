"""The rows of README.md as data: which known defects meet a machine, a layout and its versions, and what handles them.

A row of the table is an entry here, with the row's own words for place and versions; a test compares the two.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from megatron_gspo.patches.mark import MARK


@dataclass(frozen=True)
class Situation:
    """What decides whether a defect is met. megatron, sglang: the numbers of the versions, () where there is none;
    sglang is the lowest of all servers. layout and model as far as a config says them, else a single process."""

    megatron: tuple[int, ...] = ()
    sglang: tuple[int, ...] = ()
    gpu: bool = False
    transformer_engine: bool = False
    apex: bool = False
    gloo: bool = True
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    world_size: int = 1
    has_experts: bool = False
    has_dense_layers: bool = True
    replay: bool = False
    has_config: bool = False
    starts_servers: bool = False
    servers_on_cpu: bool = False


@dataclass(frozen=True)
class Defect:
    """place, versions: as README.md has them. what: what happens. applies: where, beside the versions. marked: upstream
    functions (module:name) that are replaced once the patch is in place; present: names that it supplies. all_versions:
    `applies` looks at versions itself. is_defect: False for a choice of ours."""

    place: str
    versions: str
    what: str
    applies: Callable[[Situation], bool]
    marked: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    all_versions: bool = False
    is_defect: bool = True

    @property
    def range(self) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
        """(package, first, last version) as numbers; None for all."""
        found = re.match(r"(megatron-core|sglang) (\S+)(?: - (\S+))?", self.versions)
        return (found[1], _numbers(found[2]), _numbers(found[3] or found[2])) if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


def applicable(situation: Situation) -> list[Defect]:
    """The defects that this situation meets."""
    return [defect for defect in DEFECTS if defect.is_defect and _meets(defect, situation)]


def _meets(defect: Defect, situation: Situation) -> bool:
    if defect.range is not None and not defect.all_versions:
        package, first, last = defect.range
        version = situation.megatron if package == "megatron-core" else situation.sglang
        if not version or not first <= version[: len(first)] or not version[: len(last)] <= last:
            return False
    return defect.applies(situation)


def missing(defect: Defect) -> list[str]:
    """Of the functions that the patch replaces or supplies, those that are as upstream has them: it isn't in place."""
    return [name for name in defect.marked if not hasattr(_resolve(name), MARK)] + [
        name for name in defect.present if not _exists(name)
    ]


def _resolve(name: str) -> object:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _exists(name: str) -> bool:
    try:
        _resolve(name)
    except AttributeError:
        return False
    return True


def _no_fused_adam(situation: Situation) -> bool:
    return not (situation.transformer_engine or situation.apex)


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
_ON_CPU = "megatron-core 0.16.1 - 0.19.2 on a machine without CUDA"
_NO_ENGINE = "megatron-core 0.16.1 - 0.19.2 without Transformer Engine"
_ANY = "megatron-core 0.16.1 - 0.19.2"

DEFECTS = (
    Defect(
        "`expert_gradients.py` (1)", "megatron-core 0.16.1 - 0.18.2",
        "TP > 1, EP = 1, expert-TP = 1: the gradients of the experts' replicas are never added up, silently",
        lambda s: s.has_experts and s.tensor > 1 and s.expert == 1 and s.expert_tensor == 1,
    ),
    Defect(
        "`expert_gradients.py` (2)", "megatron-core 0.16.1 - 0.18.2 with Transformer Engine's grouped experts",
        "TP > 1, EP > 1, expert-TP = 1: most experts are left out of the gradient norm, so that clipping is too weak",
        lambda s: s.has_experts and s.transformer_engine and s.tensor > 1 and s.expert > 1 and s.expert_tensor == 1,
    ),
    Defect(
        "`adam_step.py` (1)", "megatron-core 0.16.1 - 0.19.2 without Transformer Engine and Apex",
        "resuming torch's Adam fails, or counts every step once for each parameter", _no_fused_adam,
        (_OPTIMIZER + "state_dict", _OPTIMIZER + "_set_main_param_and_optimizer_states"),
    ),
    Defect(
        "`adam_step.py` (2)", "megatron-core 0.16.1 - 0.19.2 without Transformer Engine and Apex",
        "no checkpoint can be written where a stage's optimizer holds no parameter",
        lambda s: _no_fused_adam(s) and s.has_experts and s.has_dense_layers and s.pipeline > 1 and s.expert > 1,
        (_OPTIMIZER + "state_dict",),
    ),
    Defect(
        "`te_general_gemm.py`", "megatron-core 0.16.1 without Transformer Engine",
        "the router's first forward pass raises NameError", lambda s: not s.transformer_engine, (),
        ("megatron.core.transformer.moe.moe_utils:te_general_gemm",),
    ),
    Defect(
        "`megatron_on_cpu.py`", _ON_CPU, "device literals, streams and random state are CUDA's", lambda s: not s.gpu,
        ("torch:cuda.current_device", "torch:empty", "megatron.core.tensor_parallel.random:_get_cuda_rng_state"),
    ),
    Defect(
        "`moe_uneven_collectives.py`", _ON_CPU + "; torch's gloo",
        "gloo refuses the parts of unequal size that experts exchange",
        lambda s: not s.gpu and s.has_experts and s.world_size > 1,
        ("torch.distributed:all_to_all_single", "torch.distributed:all_gather", "torch.distributed:reduce_scatter"),
    ),
    Defect("`quiet.py`", _ANY, "every rank says at every start what is absent", lambda s: True, is_defect=False),
    Defect(
        "`sglang_on_cpu/sitecustomize.py` (1)", "sglang 0.5.23 on a machine without a GPU",
        "names of sgl_kernel are missing: the server ends at its start",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    Defect(
        "`sglang_on_cpu/sitecustomize.py` (2)", "sglang 0.5.15.post1 - 0.5.23 on a machine without a GPU",
        "the buffer of routed experts is pinned through CUDA: the server ends at its start",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    Defect(
        "`sglang_on_cpu/sitecustomize.py` (3)", "sglang 0.5.15.post1 - 0.5.23 with torch's build for CPUs",
        "torchvision describes operators that it lacks: the server ends at its start",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    Defect(
        "`mcore/model.py`: `overlap_p2p_comm` on, `batch_p2p_comm` off under interleaving", _ANY,
        "with two interleaved stages a batched exchange mixes up activations and gradients, silently",
        lambda s: s.virtual_pipeline > 1,
    ),
    Defect(
        "`mcore/model.py`: `deallocate_pipeline_outputs` off under interleaving and on gloo",
        "megatron-core 0.16.1 - 0.17.1 (interleaving); all (gloo)", "an output is freed while it is still being sent",
        lambda s: s.pipeline > 1 and (s.gloo or (s.virtual_pipeline > 1 and s.megatron[:2] < (0, 18))),
        all_versions=True,
    ),
    Defect(
        "`mcore/layers.py`: `RMSNorm`", _NO_ENGINE, "the torch norm refuses sequence parallelism",
        lambda s: not s.transformer_engine and s.tensor > 1,
    ),
    Defect(
        "`mcore/attention.py`: `PackedAttention`", _NO_ENGINE,
        "the torch attention refuses packed sequences and context parallelism",
        lambda s: not s.transformer_engine and s.has_config,
    ),
    Defect(
        "`mcore/forward_step.py`: refuses `calculate_per_token_loss`", "all",
        "the schedule would divide a loss that is already normalised", lambda s: True, is_defect=False,
    ),
    Defect(
        "`mcore/checkpoint/save_load.py`: results in process", _ANY,
        "a save spawns a process on every rank that imports the program again and outlives a killed rank",
        lambda s: s.has_config,
    ),
    Defect(
        "`mcore/checkpoint/save_load.py`: files of rank 0", _ANY,
        "where rank 0 can't write its own file of a checkpoint, the other ranks wait in a collective",
        lambda s: s.has_config and s.world_size > 1,
    ),
    Defect(
        "`mcore/checkpoint/save_load.py`: optimizer state without its common part", _ANY,
        "the common part of a checkpoint fits its own layout only", lambda s: s.has_config,
    ),
    Defect(
        "`mcore/routing_replay/router_hooks.py`: `RouterHook`, `refuse_bypasses`", _ANY,
        "a fused router returns before it asks for routes, so that replay is silently off", lambda s: s.replay,
    ),
    Defect(
        "`mcore/routing_replay/router_hooks.py`: routes with the micro-batch", _ANY,
        "routes of recomputations are popped in the order in which they were set, right for some schedules only",
        lambda s: s.replay,
    ),
    Defect(
        "`mcore/layers.py`: `_name_as_transformer_engine`", _NO_ENGINE,
        "the norm before the experts is stored under a key that Transformer Engine's layers don't look for",
        lambda s: s.has_experts and not s.transformer_engine,
    ),
    Defect(
        "`setup.py`: `psutil`", "megatron-core 0.19.2", "checkpoints need psutil, which the wheel doesn't ask for",
        lambda s: True,
    ),
    Defect(
        "`servers/launch_command.py`: `--disable-overlap-schedule`",
        "sglang 0.5.15.post1 on a machine without a GPU (chosen below 0.5.23)",
        "more than half of the routed experts' rows are silently wrong",
        lambda s: bool(s.sglang) and s.sglang < (0, 5, 23) and s.starts_servers and s.servers_on_cpu, all_versions=True,
    ),
    Defect(
        "`servers/launch_command.py`: `server_environment`", "all",
        "a server that inherits torchrun's environment waits for a store that nobody serves",
        lambda s: s.starts_servers,
    ),
)  # fmt: skip
