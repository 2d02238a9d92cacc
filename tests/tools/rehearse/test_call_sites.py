"""Call sites."""

import torch

from megatron_gspo.tools.rehearse.call_sites import call_site, frames_above


def inner() -> tuple[str, ...]:
    return call_site(frames_above(1))


def test_the_innermost_frame_is_first() -> None:
    found = inner()
    assert found[0].startswith("tests/tools/rehearse/test_call_sites.py:")
    assert found[0].endswith(" inner")
    assert found[1].endswith(" test_the_innermost_frame_is_first")


def test_torch_is_left_out() -> None:
    class Module(torch.nn.Module):
        def forward(self) -> tuple[str, ...]:
            return call_site(frames_above(1))

    assert not any(site.startswith("torch/") for site in Module()())
