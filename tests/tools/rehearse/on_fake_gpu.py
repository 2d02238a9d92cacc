"""Tests that run in one process of their own, with the fake CUDA device, which must be there before torch.

``python -m tests.tools.rehearse.on_fake_gpu OUTPUT`` runs them all and writes the traceback of each that fails.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def on_fake_gpu(function: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test whose body runs in that process."""
    name = f"{function.__module__}.{function.__name__}"

    def test(fake_gpu_outcomes: dict[str, str]) -> None:
        assert not fake_gpu_outcomes[name], fake_gpu_outcomes[name]

    test.__doc__ = function.__doc__
    test.on_fake_gpu = function  # type: ignore[attr-defined]
    return test


def modules() -> list[str]:
    """Test modules of this folder; those whose name has ONLY of the environment in it."""
    root = FOLDER.parents[2]
    only = os.environ.get("ONLY", "test_")
    files = [path for path in sorted(FOLDER.rglob("test_*.py")) if only in path.name]
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in files]


def outcomes() -> dict[str, str]:
    found: dict[str, str] = {}
    for module in map(importlib.import_module, modules()):
        tests: dict[str, Any] = {name: getattr(value, "on_fake_gpu", None) for name, value in vars(module).items()}
        for name, function in tests.items():
            if function is not None:
                try:
                    function()
                    found[f"{module.__name__}.{name}"] = ""
                except Exception:
                    found[f"{module.__name__}.{name}"] = traceback.format_exc()
    return found


def main() -> None:
    from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

    import_torch_with_fake_device()
    import torch

    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.host_log import HostLog

    torch.set_num_threads(1)
    with fake_cuda(HostLog()):
        Path(sys.argv[1]).write_text(json.dumps(outcomes()))


if __name__ == "__main__":
    main()
