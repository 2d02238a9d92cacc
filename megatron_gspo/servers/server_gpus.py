"""The GPUs of started servers."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import InputError
from megatron_gspo.servers.server_args import option


def product_of_sizes(
    server_args: Sequence[str], sizes: Sequence[Sequence[str]], section: str
) -> int:
    """The product of parallel sizes in a server's arguments. sizes: the names of each option, the
    full one first.

    Raises InputError for an invalid size.
    """
    count = 1
    for names in sizes:
        value = next((value for name in names if (value := option(server_args, name))), "1")
        if not value.isdecimal() or not int(value):
            raise InputError(
                f"{section}.server_args: {names[0]} {value}: must be a positive number"
            )
        count *= int(value)
    return count


def first_server_gpu(
    servers: ServerConfig,
    gpus_per_server: int,
    *,
    trainer_gpus: int,
    visible_gpus: int,
    option_name: str | None,
) -> int:
    """Index of the first server's first GPU; the servers take consecutive GPUs from it on.

    option_name: of the servers, which sets it; else it is the first GPU that no rank of this node
    uses, or 0 if colocated. trainer_gpus: ranks on this node, which use the GPUs 0 ..
    trainer_gpus-1. visible_gpus: of this node.

    Raises InputError if a server would share a GPU with the trainer and is not colocated, or if
    there are too few.
    """
    section = servers.section
    default = 0 if servers.colocated else trainer_gpus
    given = option(servers.server_args, option_name) if option_name else None
    if given is not None and not given.isdecimal():
        raise InputError(f"{section}.server_args: {option_name} {given}: must be a GPU's index")
    first = default if given is None else int(given)
    end = first + servers.num_servers * gpus_per_server
    if first < trainer_gpus and not servers.colocated:
        raise InputError(
            f"{section}.server_args: {option_name} {first}: the trainer uses the GPUs 0 to"
            f" {trainer_gpus - 1}; set {option_name} to {trainer_gpus} or more, or"
            f" {section}.colocated=true"
        )
    if end > visible_gpus:
        raise InputError(
            f"{section}.num_servers={servers.num_servers}: the servers need the GPUs {first} to"
            f" {end - 1}, this node has {visible_gpus}; use fewer ranks or servers, {section}.urls"
            f" of other nodes, or {section}.colocated=true"
        )
    return first
