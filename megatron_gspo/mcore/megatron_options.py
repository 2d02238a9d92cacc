"""The config's ``megatron`` section: options passed through to Megatron's own config classes.

An option goes to each of ``TransformerConfig``, ``OptimizerConfig`` and
``DistributedDataParallelConfig`` that has it. Refused are unknown options, those that another
config key sets, and those that would break what this package assumes (``megatron_refusals``).
Keywords of our own go through `construct` too: none is dropped where Megatron lacks it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gspo.config import ConfigError
from megatron_gspo.errors import RunError, first_line
from megatron_gspo.mcore.megatron_refusals import (
    bypasses_router_hooks,
    key_that_sets,
    needs_transformer_engine,
    reason_to_refuse,
)

CLASSES: tuple[type, ...] = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

T = TypeVar("T")

Annotation: TypeAlias = Any
"""The type of a field, or a form such as `int | None`: what `typing.get_type_hints` returns."""


@dataclass(frozen=True)
class MegatronOptions:
    """Checked options, by the class that takes them."""

    transformer: dict[str, object] = field(default_factory=dict)
    optimizer: dict[str, object] = field(default_factory=dict)
    ddp: dict[str, object] = field(default_factory=dict)


def resolve_options(
    options: Mapping[str, object], *, uses_routes: bool = True, fused: bool = True
) -> MegatronOptions:
    """The options of the ``megatron`` section, each for the classes of the installed Megatron that
    have it.

    uses_routes: whether the run replays or measures routes, so that options that bypass the router
    hooks are refused. fused: whether Transformer Engine's kernels can be used. Raises
    ``ConfigError`` for an unknown option, one that another key sets, one that is refused, and a
    wrong type.
    """
    options_by_class: tuple[dict[str, object], ...] = ({}, {}, {})
    for name, value in options.items():
        owners = [
            (cls, values)
            for cls, values in zip(CLASSES, options_by_class, strict=True)
            if name in _fields(cls)
        ]
        if not owners:
            raise _unknown(name, value)
        if key := key_that_sets(name):
            raise ConfigError(
                f"megatron.{name}", value, f"is set by {key}", f"remove it and set {key}"
            )
        if reason := reason_to_refuse(name, value):
            raise ConfigError(f"megatron.{name}", value, reason, "remove it")
        if uses_routes and bypasses_router_hooks(name, value):
            problem = "bypasses the router hooks of routing replay and routing metrics"
            fix = "remove it, or set routing.replay: none and routing.metrics: false"
            raise ConfigError(f"megatron.{name}", value, problem, fix)
        if not fused and needs_transformer_engine(name, value):
            problem = (
                "uses kernels of Transformer Engine, which is not installed here or finds no CUDA"
                " device"
            )
            raise ConfigError(
                f"megatron.{name}", value, problem, "install Transformer Engine, or remove it"
            )
        for cls, values in owners:
            values[name] = _converted(name, value, _fields(cls)[name])
    return MegatronOptions(*options_by_class)


def construct(
    cls: Callable[..., T], keywords: Mapping[str, object], options: Mapping[str, object]
) -> T:
    """``cls(**keywords)`` with the user's options, which win.

    Raises ``RunError`` for a keyword of ours that the installed class lacks, and ``ConfigError``
    with Megatron's own message for options that it rejects.
    """
    name = getattr(cls, "__name__", str(cls))
    if lacking := sorted(set(keywords) - set(_fields(cls))):
        raise RunError(
            f"{name} of megatron-core {version()} has no option {lacking[0]}, which this package"
            " sets; install a supported version (0.16.1 to 0.19)"
        )
    with rejections(name, options):
        return cls(**{**keywords, **options})


@contextmanager
def rejections(name: str, options: Mapping[str, object]) -> Iterator[None]:
    """Raise ``ConfigError`` with Megatron's message where it fails within the context, if the user
    gave options.

    name: what is built within the context.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        ValueError,
        AssertionError,
        TypeError,
        NotImplementedError,
        ImportError,
        RuntimeError,
    ) as error:
        if not options or isinstance(error, RunError):
            raise
        problem = f"{name} of megatron-core {version()} rejects the options: {first_line(error)}"
        raise ConfigError(
            "megatron", dict(options), problem, "correct or remove the option"
        ) from error


def version() -> str:
    """The installed version of megatron-core."""
    return str(megatron.core.__version__).partition("+")[0]


def _unknown(name: str, value: object) -> ConfigError:
    known = sorted({name for cls in CLASSES for name in _fields(cls)})
    close = difflib.get_close_matches(name, known, n=1)
    names = ", ".join(cls.__name__ for cls in CLASSES)
    fix = f"did you mean {close[0]}?" if close else "remove it"
    return ConfigError(
        f"megatron.{name}", value, f"is not an option of {names} of megatron-core {version()}", fix
    )


@functools.cache
def _fields(cls: Any) -> dict[str, Annotation]:
    """Option -> annotation, of those that the constructor takes."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


def _converted(name: str, value: object, annotation: Annotation) -> object:
    """The value in the annotated type: names of dtypes and enum members are looked up.

    Raises ``ConfigError`` for another type. Annotations of other kinds are left to Megatron.
    """
    for option in _alternatives(annotation):
        if option is torch.dtype and isinstance(value, str) and value in _DTYPES:
            return _DTYPES[value]
        if (
            isinstance(option, enum.EnumMeta)
            and isinstance(value, str)
            and value in option.__members__
        ):
            return option[value]
    if any(_fits(option, value) for option in _alternatives(annotation)):
        return value
    expected = " or ".join(_describe(option) for option in _alternatives(annotation))
    raise ConfigError(f"megatron.{name}", value, "has the wrong type", f"set {expected}")


def _alternatives(annotation: Annotation) -> tuple[Annotation, ...]:
    origin: object = typing.get_origin(annotation)
    is_union = origin in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _fits(option: Annotation, value: object) -> bool:
    origin: object = typing.get_origin(option)
    if option is type(None):
        return value is None
    if option is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if option in (bool, str):
        return isinstance(value, option)
    if origin is typing.Literal:
        return value in typing.get_args(option)
    if option in (list, tuple) or origin in (list, tuple):
        return isinstance(value, (list, tuple))
    return (
        not _is_code(option) and option is not torch.dtype and not isinstance(option, enum.EnumMeta)
    )


def _is_code(option: Annotation) -> bool:
    """Whether an option is a function or a context manager, which a config file can't hold."""
    origin = typing.get_origin(option)
    return origin in (
        Callable,
        typing.get_origin(typing.Callable[..., object]),
        typing.get_origin(typing.ContextManager),
    )


def _describe(option: Annotation) -> str:
    if option is type(None):
        return "null"
    if option is torch.dtype:
        return f"one of {', '.join(_DTYPES)}"
    if isinstance(option, enum.EnumMeta):
        return f"one of {', '.join(option.__members__)}"
    origin: object = typing.get_origin(option)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(option)))}"
    if _is_code(option):
        return "nothing: it is a function"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names.get(option, getattr(option, "__name__", str(option)))
