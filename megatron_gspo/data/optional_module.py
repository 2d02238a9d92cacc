"""Optional dependencies, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


def optional_module(name: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise ImportError with one line that names what to
    install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {package}: pip install 'megatron-gspo[{extra}]' ({error})"
        ) from error
