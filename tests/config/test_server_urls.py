"""Which URLs name servers, and which of them only this machine reaches."""

from __future__ import annotations

import pytest

from megatron_gspo.config.server_urls import check_url, is_loopback


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a:1",
        "http://",
        "http://a:0",
        "http://user@a:1",
        "http://a/path",
        "a:1",
        "http://a:1?k=v",
        "http://a:port",
        "http://a:99999",
        "http://[::1:80",
        f"http://{'a' * 64}.b:80",
    ],
)
def test_what_is_no_server(url):
    with pytest.raises(ValueError, match="give http://host:port"):
        check_url(url)


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.8.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://node7:1", False),
        ("http://10.0.0.1:1", False),
        ("http://[::2]:1", False),
    ],
)
def test_urls_of_this_machine(url, is_local):
    assert check_url(url + "/") == url and is_loopback(url) == is_local
