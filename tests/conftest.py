"""hypothesis profiles: `ci` is the default; `pytest --hypothesis-profile=thorough` looks further, at random."""

import gc

from hypothesis import HealthCheck, Phase, settings

slow_machine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples in every run: a change that breaks nothing can't turn the tests red.
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, **slow_machine)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **slow_machine)
# For tests/seeded_bugs: a failure is expected, its smallest example is of no interest.
settings.register_profile(
    "seeded_bugs", parent=settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("ci")
gc.disable()  # until the tests are collected: a quarter of the time that their imports take


def pytest_addoption(parser):
    for engine in ("sglang", "vllm"):
        text = f"interpreter that has {engine}: runs tests/{engine} with real servers"
        parser.addoption(f"--{engine}-python", help=text)
    parser.addoption("--every", type=int, default=1, help="of the layouts in tests/equivalence, run one in so many")
    names = ", ".join(["unit", *PARTS])
    parser.addoption("--part", choices=["unit", *PARTS], help=f"the part of all tests that runs: {names}")


# What takes longer than the tests of units, in parts of .ci/run.
PARTS = {
    "runs": ("tests/train/", "tests/launch/", "tests/fault_injection/", "tests/bad_input/"),
    "layouts": ("tests/equivalence/",),
    "tools": ("tests/tools/", "tests/benchmarks/", "tests/test_installed.py"),
}
# Of these, what `make test` runs too.
IN_UNIT = (
    "tests/train/test_run.py::test_a_run_writes_its_directory",
    "tests/train/test_run.py::test_a_resumed_run_ends_the_same",
    "tests/equivalence/test_layouts.py::test_moe[tp2-pp2i-cp2-dp1-ep1-etp1]",
    "tests/equivalence/test_layouts.py::test_dense[tp2nosp-pp2i-cp2-dp1]",
    "tests/equivalence/test_layouts.py::test_family[qwen35_moe-tp2-pp1-cp1-dp1-ep2-etp1]",
    "tests/equivalence/test_layouts.py::test_lora[lora_some-tp2-pp2-cp1-dp2]",
)


def part_of(test: str) -> str:
    """The part of a test's id."""
    for part, folders in PARTS.items():
        if test.startswith(folders):
            return part
    return "unit"


def pytest_collection_modifyitems(config, items):
    """Keeps the tests of the part, unless files or tests are named on the command line."""
    part = config.getoption("part")
    if part is None or config.args_source is config.ArgsSource.ARGS:
        return
    left_out = []
    kept = []
    for item in items:
        chosen = part_of(item.nodeid) == part or (part == "unit" and item.nodeid in IN_UNIT)
        (kept if chosen else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """The garbage collector need not look through the millions of objects that all tests of this process share."""
    gc.collect()
    gc.freeze()
    gc.enable()
