"""A known issue of an upstream package as data: where it is, what handles it, and which runs it
affects.
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
    """What decides whether an issue applies.

    megatron, sglang, vllm: version numbers, () if not installed; those of servers are the lowest of
    all servers. The layout and the model come from the config; without one they describe a single
    process.
    """

    megatron: tuple[int, ...] = ()
    sglang: tuple[int, ...] = ()
    vllm: tuple[int, ...] = ()
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
    replay: bool = False
    has_config: bool = False
    starts_servers: bool = False
    servers_on_cpu: bool = False


@dataclass(frozen=True)
class KnownIssue:
    """One row of README.md.

    handled_by: the patch, or the place in the package that avoids the issue. versions: "all" or a
    package with its first and last affected version and conditions. problem: the effect. upstream:
    links, shortened as in ``readme.LINKS``. tests, delete_when: as in README.md. applies: the
    affected situations, apart from versions. marked: upstream functions (module:name) that the
    patch replaces; present: names that it adds. all_versions: ``applies`` checks the versions
    itself. is_issue: False for a choice of this project.
    """

    handled_by: str
    versions: str
    problem: str
    upstream: str
    tests: str
    delete_when: str
    applies: Callable[[Situation], bool]
    marked: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    all_versions: bool = False
    is_issue: bool = True

    @property
    def range(self) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
        """(package, first, last version) as numbers; None for all versions."""
        found = re.match(r"(megatron-core|sglang|vllm) (\S+)(?: - (\S+))?", self.versions)
        return (found[1], _numbers(found[2]), _numbers(found[3] or found[2])) if found else None

    def affects(self, situation: Situation) -> bool:
        """Whether the issue applies to these versions, this layout and this model."""
        if not self.is_issue:
            return False
        if self.range is not None and not self.all_versions:
            package, first, last = self.range
            version = {
                "megatron-core": situation.megatron,
                "sglang": situation.sglang,
                "vllm": situation.vllm,
            }[package]
            if (
                not version
                or not first <= version[: len(first)]
                or not version[: len(last)] <= last
            ):
                return False
        return self.applies(situation)

    def unpatched(self) -> list[str]:
        """The functions that the patch should have replaced or added, and has not."""
        return [name for name in self.marked if not hasattr(_resolve(name), MARK)] + [
            name for name in self.present if not _exists(name)
        ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


def _resolve(name: str) -> object:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _exists(name: str) -> bool:
    try:
        _resolve(name)
    except AttributeError:
        return False
    return True
