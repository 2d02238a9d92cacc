"""Messages between ranks: values come back as they were, and a pickle is refused, not run."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gspo.config import ConfigError
from megatron_gspo.errors import EngineError, InputError, RunError, UserError
from megatron_gspo.parallel.typed_messages import decode, encode


@dataclass(frozen=True)
class Tensors:
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    error: UserError | None = None


def test_values_of_each_type_come_back():
    value = Tensors({"a": (2, 3)}, torch.bfloat16)
    assert decode(encode(value), Tensors) == value
    path = (str(Path("/runs/a b")), Path("/runs/a b"))
    assert decode(encode(path), tuple[str, Path]) == path
    assert decode(encode(None), Path | None) is None
    assert decode(encode(["sent", 0, {"k": 1.5}, True, None])) == [
        "sent",
        0,
        {"k": 1.5},
        True,
        None,
    ]
    assert decode(encode(np.float64(0.1))) == 0.1
    assert math.isnan(decode(encode(math.nan))) and decode(encode(-math.inf)) == -math.inf
    array = np.array([[0.1, np.nan, -0.0], [np.inf, 1e-45, 3.0]], dtype=np.float32)
    [received] = decode(encode([array]), list[np.ndarray])
    assert (
        received.dtype == array.dtype
        and received.tobytes() == array.tobytes()
        and received.flags.writeable
    )


def test_an_error_keeps_its_class_and_message():
    error = ConfigError("optimizer.lr", -1.0, "is negative", "set it to a positive number")
    received = decode(encode(error), UserError)
    assert (type(received), str(received)) == (ConfigError, str(error))
    assert (received.exit_code, received.label) == (error.exit_code, error.label)


def test_an_error_of_a_class_that_this_rank_lacks_is_of_the_expected_class():
    message = encode({"class": "some.verifier.Error", "message": "no answer", "attributes": {}})
    received = decode(message, EngineError)
    assert (type(received), str(received)) == (EngineError, "no answer")
    other = encode({"class": "builtins.SystemExit", "message": "0", "attributes": {}})
    assert type(decode(other, EngineError)) is EngineError


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "expected", [Any, Tensors, UserError, Path, np.ndarray, torch.dtype, list[InputError]]
)
def test_foreign_bytes_are_one_line_and_run_nothing(expected, tmp_path):
    for message in (
        pickle.dumps(Evil(tmp_path / "ran")),
        b"",
        b"\xc1",
        b'{"class": 3}',
        encode({"dtype": "O8"}),
        encode("system"),
        encode({"class": 1, "message": 2}),
        encode({"dtype": "O", "shape": [1], "data": b"12345678"}),
    ):
        try:
            value = decode(message, expected)
        except RunError as error:
            assert "a message between ranks is damaged" in str(error) and "\n" not in str(error)
        else:
            assert expected in (Any, Path), value
    assert not (tmp_path / "ran").exists()


def test_what_has_no_type_is_refused_where_it_is_sent():
    with pytest.raises(TypeError, match="a object can't be sent"):
        encode(object())
