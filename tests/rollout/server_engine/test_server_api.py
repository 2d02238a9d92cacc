"""What a request context derives."""

from __future__ import annotations

from megatron_gspo.rollout.server_engine.server_api import RequestContext
from tests.support.served_models import served_model


def test_rows_of_routes_are_the_input_positions_that_are_fed():
    model = served_model(moe_layers=(True,), k=1, num_experts=4)
    # 5 input tokens and up to 4 new ones, of which the last is not fed
    assert RequestContext("r", 5, 4, model).route_rows == 8
    assert RequestContext("r", 5, 4, model, routes_start=4).route_rows == 4


def test_the_vocabulary_is_the_models():
    assert served_model(vocab_size=32).vocab_size == 32
