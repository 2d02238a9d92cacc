"""The section's own property; its checks are in `test_quantization_checks.py`."""

from __future__ import annotations

import pytest

from megatron_gspo.config.quantization_section import QuantizationConfig
from megatron_gspo.models.quantization.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_a_choice_that_quantises(name):
    assert QuantizationConfig(format=name).is_on and not QuantizationConfig().is_on
