"""Messages between a trainer and the process that hosts its agents."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gspo.agents.generation import Generation
from megatron_gspo.agents.process_messages import (
    Ask,
    Close,
    Follow,
    Generated,
    NotGenerated,
    OpenClient,
    Play,
    TrainerMessage,
    decode_trainers,
    encode,
)
from megatron_gspo.rollout.server_engine.server_pool import PoolState, ServerState


@pytest.mark.parametrize(
    "message",
    [
        Play(3, b"\x80requests", 64, b"\x80sampling"),
        Play(4, b"\x80requests", 64, None),
        NotGenerated(7, True, "no server"),
        OpenClient(5, b"\x80settings"),
        Follow(PoolState("a:3", 3, {"http://a": ServerState(False, False, "gone")}, paused=True)),
        Ask(6, "interrupt"),
        Close(),
    ],
)
def test_a_message_of_the_trainer_is_read_as_it_was_sent(message: TrainerMessage) -> None:
    assert decode_trainers(encode(message)) == message


@pytest.mark.parametrize("has_all", [True, False])
def test_a_reply_keeps_its_arrays(has_all: bool) -> None:
    routes = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    sent = Generation(
        tokens=np.array([5, 2**40], dtype=np.int64),
        log_probs=np.array([-0.1, -1e-30], dtype=np.float32) if has_all else None,
        versions=np.array([1, 2], dtype=np.int32),
        finish_reason="length",
        routes=routes[:, ::-1] if has_all else None,
        missing_routes=np.array([False, True, False]) if has_all else None,
    )
    message = decode_trainers(encode(Generated(9, sent)))
    assert isinstance(message, Generated) and message.call == 9
    received = message.generation
    assert received.finish_reason == "length"
    for name in ("tokens", "log_probs", "versions", "routes", "missing_routes"):
        expected = getattr(sent, name)
        value = getattr(received, name)
        if expected is None:
            assert value is None
        else:
            assert value.dtype == expected.dtype
            np.testing.assert_array_equal(value, expected)
            value[:1] = 0  # it is the receiver's own
