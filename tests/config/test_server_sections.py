"""What the section `sglang` resolves to."""

from __future__ import annotations

from megatron_gspo.config import ServerConfig, SGLangConfig
from megatron_gspo.config.fields import field_types


def test_a_response_has_the_time_of_three_requests_unless_it_is_set() -> None:
    assert ServerConfig(request_timeout=20.0).resolved_response_timeout == 60.0
    assert ServerConfig(request_timeout=20.0, response_timeout=25.0).resolved_response_timeout == 25.0


def test_another_server_engine_would_share_every_key() -> None:
    assert field_types(SGLangConfig) == field_types(ServerConfig)
