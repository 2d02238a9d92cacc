"""Optional dependencies, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatron_gspo.errors import MissingPackageError


def optional_module(name: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency. Raises MissingPackageError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {package}: pip install 'megatron-gspo[{extra}]' ({error})"
        ) from error
