"""Validation of server URLs."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_url(url: str) -> str:
    """`url` without a trailing slash. Raises ValueError, in one line that shows no password, unless
    it is http or https with a host, perhaps a port, and nothing else."""
    if not _is_server_url(url):
        raise ValueError(
            f"{without_password(url)}: give http://host:port, without user, path or query"
        )
    return url.rstrip("/")


def _is_server_url(url: str) -> bool:
    if any(map(str.isspace, url)):
        return False
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        port = parts.port
    except ValueError:  # brackets without an address, no port number, a label that no host can have
        return False
    if parts.scheme not in ("http", "https") or not host or port == 0:
        return False
    if parts.query or parts.fragment or "@" in parts.netloc:
        return False
    return parts.path in ("", "/")


def is_loopback(url: str) -> bool:
    """Whether a valid URL names the machine itself, so that other machines don't reach that
    server.
    """
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_password(url: str) -> str:
    """The part of a URL, valid or not, that a message may show, on one line."""
    return "".join(url.rpartition("@")[2].splitlines())
