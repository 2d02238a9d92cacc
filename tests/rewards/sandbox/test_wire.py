"""Messages over a pipe."""

import os
import threading

import pytest

from megatron_gspo.rewards.sandbox import wire


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass


def test_messages_larger_than_the_pipe_arrive_in_order(pipe):
    reader, writer = pipe
    messages = [{"a": 1}, b"x" * 10**6, None]
    sender = threading.Thread(target=lambda: [wire.send(writer, message) for message in messages])
    sender.start()
    assert [wire.receive(reader, 10.0) for _ in messages] == messages
    sender.join()


def test_a_side_that_has_gone(pipe):
    reader, writer = pipe
    os.write(writer, b"\0\0")
    os.close(writer)
    with pytest.raises(EOFError):
        wire.receive(reader)


def test_a_side_that_says_nothing(pipe):
    with pytest.raises(TimeoutError):
        wire.receive(pipe[0], 0.05)
