"""What a server unpickles: by SGLang's own rules for a flattened bucket, and with nothing that
those rules forbid.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_gspo.weight_transport.buckets import Bucket, buckets
from megatron_gspo.weight_transport.sglang_payload import (
    by_handle,
    by_value,
    shared_buffer,
)

# Of what SafeUnpickler in sglang 0.5.23 allows (srt/utils/common.py): the names that a bucket
# needs.
ALLOWED = {
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.storage", "TypedStorage"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "int64"),
    ("torch", "uint8"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
}
STREAM = [
    ("a.weight", torch.randn(3, 5)),
    ("b", torch.randn(6).bfloat16()),
    ("c", torch.arange(4)),
    ("empty", torch.empty(0, 2)),
    ("d", torch.randn(())),
]


class Unpickler(pickle.Unpickler):
    """As the server's: a saved storage is loaded with `weights_only`."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda saved: torch.load(io.BytesIO(saved), weights_only=True)
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


def reconstruct(payload: dict) -> list[tuple[str, Tensor]]:
    """As FlattenedTensorBucket.reconstruct_tensors."""
    flat = payload["flattened_tensor"]
    return [
        (m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
        for m in payload["metadata"]
    ]


def one_bucket(**more: object) -> Bucket:
    (bucket,) = buckets(STREAM, 1000, **more)
    return bucket


def assert_is_the_stream(tensors: list[tuple[str, Tensor]]) -> None:
    for (name, tensor), (wanted_name, wanted) in zip(tensors, STREAM, strict=True):
        assert name == wanted_name and tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


def test_by_value() -> None:
    payload = b"".join(by_value(one_bucket()))
    assert_is_the_stream(reconstruct(Unpickler(io.BytesIO(payload)).load()))


def test_by_value_holds_the_bucket_itself_and_little_else() -> None:
    large = torch.arange(2**18, dtype=torch.float32)
    (bucket,) = buckets([("a", large)], 2**20)
    payload = b"".join(by_value(bucket))
    assert bucket.nbytes < len(payload) < bucket.nbytes + 2000
    views = [piece for piece in by_value(bucket) if isinstance(piece, memoryview)]
    assert [len(view) for view in views] == [bucket.nbytes]
    bucket.data.zero_()
    assert bytes(views[0]) == bytes(bucket.nbytes)  # the same memory


def test_by_handle_in_another_process(tmp_path: Path) -> None:
    bucket = one_bucket(allocate=shared_buffer)
    payload = by_handle(bucket)
    names = {
        argument for opcode, argument, _ in pickletools.genops(payload) if opcode.name == "GLOBAL"
    }
    assert "torch.multiprocessing.reductions rebuild_storage_filename" in names
    (tmp_path / "payload").write_bytes(payload)
    script = (
        "import io, sys, torch; sys.path.insert(0, sys.argv[2])\n"
        "from tests.weight_transport.test_sglang_payload import Unpickler, reconstruct\n"
        "tensors = reconstruct(Unpickler(open(sys.argv[1], 'rb')).load())\n"
        "torch.save({name: tensor.clone() for name, tensor in tensors}, sys.argv[1] + '.seen')\n"
        "tensors[0][1].fill_(7.0)\n"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "payload"), root], check=True)
    assert_is_the_stream(list(torch.load(tmp_path / "payload.seen").items()))
    assert bucket.tensors()[0][1].eq(7.0).all()  # one memory, no copy


def test_by_handle_leaves_other_memory_alone() -> None:
    parameter = torch.arange(10.0)
    (bucket,) = buckets([("a", parameter)], 8)
    with pytest.raises(ValueError, match="shared_buffer"):
        by_handle(bucket)
    assert not parameter.is_shared()
