"""A tiny model, and the gradients of its policy with and without the patches."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from tests.support.distributed import run_distributed
from tests.support.patched_policies import guarded_and_not
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "moe", num_experts=4)


@pytest.fixture(scope="module")
def defects(path) -> dict[str, Any]:
    return run_distributed(guarded_and_not, 2, path)[0]
