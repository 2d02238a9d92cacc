"""What the section `sglang` resolves to."""

from __future__ import annotations

import pytest

from megatron_gspo.config import ServerConfig, SGLangConfig, VLLMConfig
from megatron_gspo.config.fields import choices, field_types


def test_a_response_has_the_time_of_three_requests_unless_it_is_set() -> None:
    assert ServerConfig(request_timeout=20.0).resolved_response_timeout == 60.0
    assert (
        ServerConfig(request_timeout=20.0, response_timeout=25.0).resolved_response_timeout == 25.0
    )


@pytest.mark.parametrize("engine", [SGLangConfig, VLLMConfig])
def test_engines_share_every_key_but_the_choice_of_transports(engine) -> None:
    shared = dict(field_types(ServerConfig))
    own = dict(field_types(engine))
    assert set(choices(own.pop("weight_transport"))) <= set(choices(shared.pop("weight_transport")))
    assert own == shared
