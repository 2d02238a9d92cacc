"""Tests that run in one process of their own, with the fake CUDA device, which must be there before
torch.

``python -m tests.tools.rehearse.on_fake_gpu OUTPUT NAME...`` runs these and writes the traceback of
each that fails.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def on_fake_gpu(function: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test whose body runs in that process."""
    name = f"{function.__module__}.{function.__name__}"

    def test(fake_gpu_outcomes: dict[str, str]) -> None:
        assert not fake_gpu_outcomes[name], fake_gpu_outcomes[name]

    test.__doc__ = function.__doc__
    test.on_fake_gpu = name, function  # type: ignore[attr-defined]
    return test


def outcomes(names: list[str]) -> dict[str, str]:
    """The traceback of each test, or nothing, in the order of ``names``."""
    results: dict[str, str] = {}
    for name in names:
        module, _, test = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), test).on_fake_gpu[1]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results


def main() -> None:
    from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

    import_torch_with_fake_device()
    import torch

    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.host_log import HostLog

    torch.set_num_threads(1)
    with fake_cuda(HostLog()):
        Path(sys.argv[1]).write_text(json.dumps(outcomes(sys.argv[2:])))


if __name__ == "__main__":
    main()
