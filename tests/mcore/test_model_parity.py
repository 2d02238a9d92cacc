"""A Megatron checkpoint against its Hugging Face model by log-probs: agreement, wrong weights,
and invalid texts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_gspo.errors import InputError
from megatron_gspo.mcore import model_parity
from megatron_gspo.mcore.model_parity import TOLERANCE, compare_log_probs
from megatron_gspo.tools.convert import __main__ as convert
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.tiny_models import save_tiny_model

TEXT = "some words"  # a token for each character


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face model, its Megatron checkpoint, and a model of the same shape with other
    weights.
    """
    folder = tmp_path_factory.mktemp("models")
    tokenizer = character_tokenizer()
    folders = {}
    for name, seed in (("model", 0), ("other", 1)):
        folders[name] = Path(
            save_tiny_model(folder / name, "shared", seed, vocab_size=len(tokenizer))
        )
        tokenizer.save_pretrained(folders[name])
    folders["megatron"] = folder / "megatron"
    convert.main(
        ["to-megatron", str(folders["model"]), str(folders["megatron"]), "--processes", "1"]
    )
    return folders


def test_other_weights_are_named_and_the_process_group_is_gone(models):
    with pytest.raises(InputError) as caught:
        compare_log_probs(models["other"], models["megatron"], TEXT)
    message = str(caught.value)
    assert message.startswith(f"log-probs of {models['other']} and {models['megatron']} differ by ")
    assert message.endswith(" nats; convert it again")
    assert float(message.split("differ by ")[1].split()[0]) > 1000 * TOLERANCE
    assert not dist.is_initialized()


@pytest.mark.parametrize("off", [0.0, 0.9, 1.1, float("nan")])
def test_the_largest_difference_decides_and_nan_is_one(off, models, monkeypatch):
    """off: in units of the tolerance, at one token."""
    ours = np.full(3, -1.0)
    monkeypatch.setattr(model_parity, "_by_megatron", lambda *_: ours)
    monkeypatch.setattr(
        model_parity, "_by_transformers", lambda *_: ours - np.array([0.0, off * TOLERANCE, 0.0])
    )
    if off < 1.0:
        assert compare_log_probs(models["model"], models["megatron"], TEXT) == (
            pytest.approx(off * TOLERANCE),
            3,
        )
    else:
        with pytest.raises(InputError, match="differ by"):
            compare_log_probs(models["model"], models["megatron"], TEXT)
