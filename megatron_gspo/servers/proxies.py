"""Proxies of the environment (`http_proxy`, `no_proxy`): none between a run and the servers on
its machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import psutil

from megatron_gspo.config.server_urls import is_loopback

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_NO_PROXY = ("no_proxy", "NO_PROXY")
_WILDCARDS = ("", "0.0.0.0", "::")  # a server that listens there is asked at loopback


def own_hosts() -> list[str]:
    """Names and addresses of this machine, loopback first. No name server is asked."""
    hosts = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address:
                hosts.append(address.address)
    return list(dict.fromkeys(hosts))


def around_the_proxy(environment: Mapping[str, str], host: str = "") -> dict[str, str]:
    """The environment of a server that reaches itself without a proxy: its `no_proxy` also names
    this machine.

    host: where the server listens, as it names it. Without a proxy in the environment nothing
    changes.
    """
    names = {name.lower() for name, value in environment.items() if value}
    if not names.intersection(_PROXIES):
        return dict(environment)
    entries = ",".join(environment.get(name, "") for name in _NO_PROXY).split(",")
    excluded = [entry.strip() for entry in entries if entry.strip()]
    if "*" in excluded:  # for most programs it has a meaning only where it stands alone
        value = "*"
    else:
        listens = [] if host in _WILDCARDS else [host]
        value = ",".join(dict.fromkeys([*excluded, *own_hosts(), *listens]))
    return {**environment, **dict.fromkeys(_NO_PROXY, value)}


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The HTTP proxy that the environment names for a server; None: it is reached directly, as
    every server on this machine is."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = _variable(environment, f"{parts.scheme}_proxy") or _variable(environment, "all_proxy")
    if not proxy or is_loopback(url) or host in own_hosts():
        return None
    excluded = _variable(environment, "no_proxy")
    if proxy_bypass_environment(host, {"no": excluded}) or _is_in_networks(host, excluded):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    # Our client knows no others.
    return proxy if proxy.startswith(("http://", "https://")) else None


def _variable(environment: Mapping[str, str], name: str) -> str:
    """The variable as programs read it: lower case first, even if it is empty."""
    return environment.get(name, environment.get(name.upper(), ""))


def _is_in_networks(host: str, excluded: str) -> bool:
    """Whether an address is in one of the networks (10.0.0.0/8) of a `no_proxy`."""
    for entry in excluded.split(","):
        if "/" not in entry:
            continue
        try:
            network = ipaddress.ip_network(entry.strip(), strict=False)
            if ipaddress.ip_address(host) in network:
                return True
        except ValueError:  # a name
            continue
    return False
