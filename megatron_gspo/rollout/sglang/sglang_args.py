"""The GPUs of started SGLang servers, from their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.servers.server_gpus import product_of_sizes

BASE_GPU = "--base-gpu-id"


def gpus_per_server(server_args: Sequence[str]) -> int:
    """Number of GPUs of a server with these arguments. Raises InputError for an invalid size."""
    sizes = [
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        ("--pp-size", "--pipeline-parallel-size", "--pp"),
    ]
    # With it, data-parallel ranks share the tensor-parallel GPUs.
    if "--enable-dp-attention" not in server_args:
        sizes.append(("--dp-size", "--data-parallel-size", "--dp"))
    return product_of_sizes(server_args, sizes, "sglang")
