"""The layers of four families move no more bytes outside of products, and launch no more kernels,
than ``traffic.json`` holds. Both are counted, so that they are the same on any machine.
"""

import json

import pytest

from .on_fake_gpu import on_fake_gpu
from .traffic import FILE, growth, total, traffic_of, versions

HELD = json.loads(FILE.read_text())

pytestmark = pytest.mark.skipif(
    HELD["versions"] != versions(), reason=f"counted with {HELD['versions']}"
)


def check(family: str) -> None:
    before = {site: tuple(amounts) for site, amounts in HELD["families"][family].items()}
    measured = traffic_of(family)
    pairs = zip(total(measured), total(before), strict=True)
    assert all(now <= then for now, then in pairs), "\n".join(
        [
            f"{family}: there is more traffic than traffic.json holds:",
            *growth(before, measured),
            "If that is meant, run python -m tests.tools.rehearse.traffic",
        ]
    )


@on_fake_gpu
def test_qwen3_moe() -> None:
    check("qwen3_moe")


@on_fake_gpu
def test_latent_attention() -> None:
    check("deepseek_v3")


@on_fake_gpu
def test_sink_attention() -> None:
    check("gpt_oss")


@on_fake_gpu
def test_gated_delta_nets() -> None:
    check("qwen3_next")


def test_growth_names_class_and_call_site() -> None:
    held = {"copy, forward, layers.py forward": (2, 100), "norm, forward, layers.py norm": (1, 10)}
    measured = {
        "copy, forward, layers.py forward": (3, 100),
        "norm, forward, layers.py norm": (1, 9),
        "sort, forward, router.py route": (1, 8),
    }
    assert growth(held, measured) == [
        "copy, forward, layers.py forward: 3 launches and 100 bytes, before 2 and 100",
        "sort, forward, router.py route: 1 launches and 8 bytes, before 0 and 0",
    ]
    assert total(measured) == (5, 117)
