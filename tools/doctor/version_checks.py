"""Versions: which are there, which are supported, which have been tested."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_gspo.tools.doctor.findings import Finding, error, note, ok, warning


@dataclass(frozen=True)
class Support:
    """name: of the distribution. needs: versions that work, as in setup.py. tested: the newest that
    the tests have run on; "" where none has. optional: works without it; what: what it is used for
    then.
    """

    name: str
    needs: str
    tested: str = ""
    optional: bool = False
    what: str = ""


SUPPORTED = (
    Support("python", ">=3.11,<3.14", "3.13"),
    Support("torch", ">=2.11,<2.16", "2.15.0"),
    Support("megatron-core", ">=0.16.1,<0.20", "0.19.2"),
    Support("transformers", ">=5.19,<5.25", "5.24.0"),
    Support("safetensors", ">=0.4.3"),
    Support("numpy", ">=1.26"),
    Support("psutil", ">=5.9"),
    Support("aiohttp", ">=3.9"),
    Support("msgspec", ">=0.19,<1"),
    Support("pybase64", ">=1.4,<2"),
    Support("transformer-engine", ">=2.4", "2.11.0", True, "fused layers, grouped experts"),
    Support("apex", "", "", True, "fused Adam"),
)
SERVERS = {
    "sglang": Support("sglang", ">=0.5.15.post1,<0.5.24", "0.5.23", True, "rollouts from servers"),
    "vllm": Support("vllm", ">=0.32,<0.34", "0.33.0", True, "rollouts from servers"),
}


def installed() -> dict[str, str | None]:
    """The version of Python and of every package in `SUPPORTED`; None where it isn't installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for support in SUPPORTED[1:]:
        try:
            versions[support.name] = importlib.metadata.version(support.name)
        except importlib.metadata.PackageNotFoundError:
            versions[support.name] = None
    return versions


def numbers(version: str | None) -> tuple[int, ...]:
    """The numbers at the begin of a version: (0, 5, 15) of "0.5.15.post1", () of None."""
    match = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def judge_versions(found: Mapping[str, str | None], *, gpu: bool) -> list[Finding]:
    """A finding for each package.

    gpu: whether this machine has one, else the optional ones aren't missed.
    """
    return [judge_version(support, found.get(support.name), gpu=gpu) for support in SUPPORTED]


def judge_version(support: Support, version: str | None, *, gpu: bool, where: str = "") -> Finding:
    """where: added to the name, such as the URL of a server."""
    check = f"versions.{support.name}"
    name = f"{support.name}{where}"
    wanted = support.needs.replace(",", ", ") or "any"
    if version is None and support.optional:
        if gpu:
            return note(
                check,
                f"{name}: not installed",
                f"the torch implementations do its work ({support.what})",
                f"install it for speed ({wanted})",
            )
        return ok(check, f"{name}: not installed, not needed without a GPU ({support.what})")
    if version is None:
        return error(
            check,
            f"{name}: not installed",
            "nothing runs without it",
            f"pip install '{support.name}{support.needs}'",
        )
    try:
        parsed = Version(version)
    except InvalidVersion:
        return warning(
            check,
            f"{name} {version}: no version that can be compared",
            f"{wanted} is supported",
            "install a release",
        )
    if support.needs and not SpecifierSet(support.needs).contains(parsed, prereleases=True):
        level = warning if support.optional else error
        return level(
            check,
            f"{name} {version}: not supported",
            "it may fail, or be silently wrong where a known defect is corrected for other versions"
            " only",
            f"install {support.name}{support.needs}",
        )
    newest = numbers(support.tested)
    if newest and numbers(version)[: len(newest)] > newest:
        return note(
            check,
            f"{name} {version}: newer than any that the tests have run on ({support.tested})",
            "known defects are known up to that version",
            "run the tests with it: make test",
        )
    return ok(check, f"{name} {version} ({wanted})")


def judge_accelerator(
    cuda_build: str | None, devices: list[str], nccl: str | None
) -> list[Finding]:
    """CUDA and NCCL. cuda_build: torch's CUDA version, None for a CPU build. devices: names of
    the visible GPUs.
    """
    if devices:
        names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        findings = [ok("versions.cuda", f"CUDA {cuda_build}: {names}")]
        if nccl is None:
            findings.append(
                error(
                    "versions.nccl",
                    "this torch has no NCCL",
                    "GPUs can't exchange anything, and nccl is the backend on GPUs",
                    "install a torch with NCCL, or set parallel.backend: gloo to try things",
                )
            )
        else:
            findings.append(ok("versions.nccl", f"NCCL {nccl}"))
        return findings
    if cuda_build is not None:
        return [
            note(
                "versions.cuda",
                f"torch is built for CUDA {cuda_build} and finds no GPU",
                "everything runs on the CPU",
                "on a GPU node look at nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version",
            )
        ]
    return [
        note(
            "versions.cuda",
            "torch is a CPU build",
            "everything runs on the CPU, over gloo with torch's layers: right for tests and tiny"
            " models",
            "on a GPU node install torch's CUDA build",
        )
    ]
