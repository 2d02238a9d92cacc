"""Validation of server URLs."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_url(url: str) -> str:
    """`url` without a trailing slash. Raises ValueError, in one line that shows no password, unless
    it is http or https with a host, perhaps a port, and nothing else."""
    try:
        parts = urlsplit(url)
        nothing_else = not (
            parts.query or parts.fragment or "@" in parts.netloc
        ) and parts.path in ("", "/")
        fine = parts.scheme in ("http", "https") and nothing_else and parts.port != 0
        fine = (
            fine and bool((parts.hostname or "").encode("idna")) and not any(map(str.isspace, url))
        )
    except ValueError:  # brackets without an address, no port number, a label that no host can have
        fine = False
    if not fine:
        raise ValueError(
            f"{without_password(url)}: give http://host:port, without user, path or query"
        )
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether a valid URL names the machine itself, so that other machines don't reach that
    server.
    """
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_password(url: str) -> str:
    """The part of a URL, valid or not, that a message may show, on one line."""
    return "".join(url.rpartition("@")[2].splitlines())
