"""What servers' own endpoints answer."""

from __future__ import annotations

import pytest

from megatron_gspo.rollout.server_engine.endpoint_answers import get_object, has_endpoint, positive
from megatron_gspo.servers.http_client import ServerError
from tests.support.scripted_endpoints import Server


@pytest.mark.parametrize("status, found", [(405, True), (404, False), (200, True)])
def test_an_endpoint_is_found_by_its_status(status, found):
    assert Server(path=status).run(lambda s: has_endpoint(s, "/path", timeout=5)) is found


def test_a_failing_server_is_not_taken_for_one_without_the_endpoint():
    with pytest.raises(ServerError, match="answered 503"):
        Server(path=503).run(lambda s: has_endpoint(s, "/path", timeout=5))


def test_an_object_of_another_form_is_named():
    assert Server(path={"a": 1}).run(
        lambda s: get_object(s, "/path", timeout=5, expected="a server")
    ) == {"a": 1}
    with pytest.raises(ServerError, match="/path: answered list, not an object; is this a server?"):
        Server(path=[["x"]]).run(lambda s: get_object(s, "/path", timeout=5, expected="a server"))


def test_only_counts_are_positive():
    assert [positive(value) for value in (3, 0, -1, True, "3", None)] == [
        3,
        None,
        None,
        None,
        None,
        None,
    ]
