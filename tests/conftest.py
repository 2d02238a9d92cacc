"""hypothesis profiles: `ci` is the default; `pytest --hypothesis-profile=thorough` looks further, at random."""

import gc

from hypothesis import HealthCheck, Phase, settings

slow_machine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples in every run: a change that breaks nothing can't turn the tests red.
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, **slow_machine)
settings.register_profile("thorough", max_examples=1000, print_blob=True, **slow_machine)
# For tests/mutation: a failure ends a mutant, its smallest example is of no interest.
settings.register_profile(
    "mutation", parent=settings.get_profile("ci"), max_examples=12, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("ci")
gc.disable()  # until the tests are collected: a quarter of the time that their imports take


def pytest_addoption(parser):
    for engine in ("sglang", "vllm"):
        text = f"interpreter that has {engine}: runs tests/{engine} with real servers"
        parser.addoption(f"--{engine}-python", help=text)
    parser.addoption("--every", type=int, default=1, help="of the layouts in tests/equivalence, run one in so many")


# Files of whole runs and of several hosts take minutes: begun last, one of them would keep the other processes waiting.
LONGEST_FIRST = ("tests/train/", "tests/launch/", "tests/equivalence/", "tests/bad_input/", "tests/tools/rehearse/")


def pytest_collection_modifyitems(items):
    def place(item):
        starts = [number for number, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start)]
        return starts[0] if starts else len(LONGEST_FIRST)

    items.sort(key=place)


def pytest_collection_finish():
    """The garbage collector need not look through the millions of objects that all tests of this process share."""
    gc.collect()
    gc.freeze()
    gc.enable()
