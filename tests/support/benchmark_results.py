"""Hand-made rows and results."""

from __future__ import annotations

from benchmarks.common import Row, Spread


def spread(median, width=0.0):
    return Spread(median, median - width, median + width, 9)


def row(name="a", ratio=1.0, *, width=0.0, benchmark="bench", better="lower", **more):
    """Ours is ``ratio`` to a peer of 1; ``width``: half the distance of the quartiles."""
    return Row(benchmark, name, "peer", "ms", better, spread(ratio, width), spread(ratio, width), spread(1.0), **more)


def result(*rows, **more):
    """A result of ``run_all.py``."""
    machine = {"cpu": "Fast CPU", "cores": 2, "load_average": 0.1, "gpu": None, "system": "Linux"}
    names = dict.fromkeys(row.benchmark for row in rows)
    return {
        "schema": 2, "date": "2026-01-02", "quick": False, "partial": False, "hardware": machine,
        "versions": {"python": "3.11", "torch": "2"}, "peer_versions": {"torch": "2", "verl": "9"}, "seconds": 90.0,
        "commands": {name: f"python benchmarks/{name}.py" for name in names},
        "benchmark_seconds": dict.fromkeys(names, 45.0), "not_compared": {}, "failures": {},
        "rows": [row.to_json() for row in rows],
    } | more  # fmt: skip
