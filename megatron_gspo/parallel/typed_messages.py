"""Values between ranks as bytes. A reader names the type that it expects, and nothing is unpickled:
whoever reaches the ports of torch.distributed may write to its store and connections, and a pickle
would run code in the trainer.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_gspo.errors import RunError, UserError

Type = Any  # what msgspec decodes: a class, or a form such as `list[int] | None`


def encode(value: object) -> bytes:
    """Plain data, dataclasses, paths, arrays, dtypes and ``UserError``s, as MessagePack."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(message: bytes, expected: Type = Any) -> Any:
    """A message of `encode` as a value of the expected type; ``Any`` is plain data: tuples come as
    lists.

    Raises ``RunError`` for another message, which no rank of the run has sent.
    """
    try:
        return msgspec.msgpack.decode(message, type=expected, dec_hook=_restored)
    except (msgspec.MsgspecError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RunError(
            f"a message between ranks is damaged ({error}); another process writes to the run's"
            " ports: close the network between the nodes to others (SECURITY.md)"
        ) from None


def _as_plain(value: object) -> object:
    if isinstance(value, UserError):
        attributes = {
            name: item for name, item in vars(value).items() if isinstance(item, _SCALARS)
        }
        return {"class": _name_of(type(value)), "message": str(value), "attributes": attributes}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"a {type(value).__name__} can't be sent to other ranks")


_SCALARS = (str, int, float, bool, type(None))


def _restored(expected: type, plain: Any) -> object:
    if issubclass(expected, UserError):
        return _restored_error(expected, plain)
    if expected is np.ndarray:
        return (
            np.frombuffer(plain["data"], dtype=np.dtype(plain["dtype"]))
            .reshape(plain["shape"])
            .copy()
        )
    if expected is Path:
        return Path(plain)
    if expected is torch.dtype:
        dtype = getattr(torch, plain)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise TypeError(f"{plain!r} is no {expected.__name__}")


def _restored_error(expected: type[UserError], plain: Any) -> UserError:
    """The error with its class, or as the expected class where this rank has not imported that
    one.
    """
    known = {_name_of(each): each for each in _with_subclasses(expected)}
    error_class = known.get(plain["class"], expected)
    error = error_class.__new__(error_class)  # constructors differ
    Exception.__init__(error, str(plain["message"]))
    vars(error).update(plain["attributes"])
    return error


def _name_of(error_class: type) -> str:
    return f"{error_class.__module__}.{error_class.__qualname__}"


def _with_subclasses(base: type[UserError]) -> list[type[UserError]]:
    return [
        base,
        *(each for derived in base.__subclasses__() for each in _with_subclasses(derived)),
    ]
