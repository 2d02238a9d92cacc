"""Call sites."""

import torch
import typing_extensions

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


def test_the_wrapper_of_a_deprecated_function_is_left_out() -> None:
    @typing_extensions.deprecated("as torch marks its own", category=DeprecationWarning)
    def function() -> tuple[str, ...]:
        return inner()

    assert not any("typing_extensions" in site for site in function())
