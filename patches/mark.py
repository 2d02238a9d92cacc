"""The mark that every patched function carries, so that patches are idempotent and visible in a
debugger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MARK = "_megatron_gspo_patch"  # on a replacement: the original


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make(original)``, once.

    ``owner`` is a module or class that must already have ``name``; a missing symbol raises
    ``ImportError`` naming it, since a patch for an unknown upstream would hide a defect instead of
    correcting it.
    """
    if not hasattr(owner, name):
        place = f"{getattr(owner, '__name__', owner)}.{name}"
        raise ImportError(f"cannot patch {place}: no such symbol; this upstream version is unknown")
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    replacement = make(original)
    setattr(replacement, MARK, original)
    setattr(owner, name, replacement)
