"""The GPUs of started SGLang servers, from their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.errors import InputError
from megatron_gspo.servers.server_args import option

BASE_GPU = "--base-gpu-id"


def gpus_per_server(server_args: Sequence[str]) -> int:
    """Number of GPUs of a server with these arguments. Raises InputError for an invalid size."""
    sizes = [("--tp-size", "--tensor-parallel-size", "--tp"), ("--pp-size", "--pipeline-parallel-size", "--pp")]
    if "--enable-dp-attention" not in server_args:  # with it, data-parallel ranks share the tensor-parallel GPUs
        sizes.append(("--dp-size", "--data-parallel-size", "--dp"))
    count = 1
    for names in sizes:
        value = next((value for name in names if (value := option(server_args, name))), "1")
        if not value.isdecimal() or not int(value):
            raise InputError(f"sglang.server_args: {names[0]} {value}: must be a positive number")
        count *= int(value)
    return count


def first_server_gpu(
    server_args: Sequence[str], num_servers: int, *, trainer_gpus: int, visible_gpus: int, colocated: bool
) -> int:
    """Index of the first server's first GPU; the servers take consecutive GPUs from it on.

    server_args: `--base-gpu-id` sets it; else it is the first GPU that no rank of this node uses, or 0 if colocated.
    trainer_gpus: ranks on this node, which use the GPUs 0 .. trainer_gpus-1. visible_gpus: GPUs of this node.

    Raises InputError if a server would share a GPU with the trainer and is not colocated, or if there are too few.
    """
    default = 0 if colocated else trainer_gpus
    given = option(server_args, BASE_GPU)
    if given is not None and not given.isdecimal():
        raise InputError(f"sglang.server_args: {BASE_GPU} {given}: must be a GPU's index")
    first = default if given is None else int(given)
    end = first + num_servers * gpus_per_server(server_args)
    if first < trainer_gpus and not colocated:
        raise InputError(
            f"sglang.server_args: {BASE_GPU} {first}: the trainer uses the GPUs 0 to {trainer_gpus - 1}; "
            f"set {BASE_GPU} to {trainer_gpus} or more, or sglang.colocated=true"
        )
    if end > visible_gpus:
        raise InputError(
            f"sglang.num_servers={num_servers}: the servers need the GPUs {first} to {end - 1}, this node has "
            f"{visible_gpus}; use fewer ranks or servers, sglang.urls of other nodes, or sglang.colocated=true"
        )
    return first
