"""An operation of torch, as ``__torch_dispatch__`` gets it."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch._ops import OpOverload

Operation: TypeAlias = OpOverload
"""`aten.mm.default` and the like."""

Args: TypeAlias = tuple[Any, ...]
"""Its arguments by position: tensors, lists of them, numbers, dtypes, ..."""

Kwargs: TypeAlias = dict[str, Any]
"""Its arguments by name."""

Result: TypeAlias = Any
"""A tensor, several, or a number."""
