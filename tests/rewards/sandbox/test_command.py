"""What crosses the pipe to the launcher."""

import pickle

from megatron_gspo.rewards.sandbox.command import Command, Limits, Setup


def test_a_command_has_no_place_for_an_expected_output():
    assert Command._fields == ("argv", "files", "limits", "stdin", "environment")


def test_messages_are_plain_data():
    for message in (
        Setup("/usr/bin/bwrap", False, ("/usr",)),
        Command(("a",), {"f": b""}, Limits(1.0, 2.0, 3, 4, 5), b"in"),
    ):
        assert pickle.loads(pickle.dumps(message)) == message
