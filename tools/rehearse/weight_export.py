"""The weights of a rehearsed rank on their way to the inference engine and to the files of an
export.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_gspo.config import Config
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.distributed_transport import DistributedTransport
from megatron_gspo.weight_transport.tensor_transport import SharedMemoryTransport
from megatron_gspo.weight_transport.transport import WeightTransport

# whose buckets are on the GPU
_ON_GPU: dict[str, type[WeightTransport]] = {
    "distributed": DistributedTransport,
    "ipc": SharedMemoryTransport,
}


def export(policy: Policy, config: Config) -> int:
    """Export the weights as a run with servers does: every source its own tensors, one after the
    other. A collective of all ranks.

    Returns the bytes that this rank sends as a source.
    """
    return sum(
        part.nbytes for source in policy.sources for part in _sent(policy.weights(source), config)
    )


def _sent(stream: Iterator[tuple[str, Tensor]], config: Config) -> Iterator[Tensor]:
    """What leaves a source at a time: the buckets of a transport that sends from the GPU, else
    single tensors.
    """
    transport = (
        _ON_GPU.get(config.servers.weight_transport)
        if config.rollout.engine in SERVER_KINDS
        else None
    )
    if transport is None:
        yield from (tensor for _, tensor in stream)
        return
    size = int(config.servers.weight_bucket_mb * 2**20)
    for bucket in buckets(
        stream,
        size,
        device=compute_device(),
        allocate=transport.allocate,
        in_flight=transport.in_flight,
    ):
        yield bucket.data
