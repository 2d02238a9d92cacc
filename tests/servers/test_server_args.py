"""Options of started servers."""

from __future__ import annotations

from megatron_gspo.servers.server_args import option


def test_the_last_value_of_an_option_counts():
    assert option(["--tp", "2", "--tp=4"], "--tp") == "4"
    assert option(["--tp=4", "--tp", "2", "--tp-size", "8"], "--tp") == "2"
    assert option(["--tp-size", "8"], "--tp") is None
