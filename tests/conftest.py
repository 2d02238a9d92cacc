"""hypothesis profiles: `ci` is the default; `pytest --hypothesis-profile=thorough` looks
further, at random.
"""

import argparse
import gc
from pathlib import Path

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
    parser.addoption(
        "--every",
        type=int,
        default=1,
        help="of the layouts in tests/equivalence, run one in so many",
    )
    parser.addoption(
        "--agents-environments",
        type=Path,
        metavar="FOLDER",
        help="environments with agents' packages: runs tests/agent_packages",
    )
    parser.addoption(
        "--last-cases",
        action="store_true",
        help="of each other test of tests/equivalence/test_layouts.py, run the last case",
    )
    parser.addoption(
        "--part",
        type=parts_of,
        metavar="PART[,PART...]",
        help=f"the parts of all tests that run, of {', '.join(ALL_PARTS)}",
    )


# What takes longer than the tests of units, in parts of .ci/run. Together they run in this order,
# and the tests of units last: the shortest files, so that all workers end at about the same time.
PARTS = {
    "layouts": ("tests/equivalence/",),
    "tools": ("tests/tools/", "tests/benchmarks/", "tests/test_installed.py"),
    "runs": ("tests/train/", "tests/launch/", "tests/fault_injection/", "tests/bad_input/"),
    # Most of their time is the start of processes: ranks, workers, servers, sandboxes.
    "processes": (
        "tests/agents/test_agent_host.py",
        "tests/agents/test_agent_process.py",
        "tests/agents/test_agent_session.py",
        "tests/environments/test_episode_engine.py",
        "tests/gpu/",
        "tests/loop/test_log_prob_check.py",
        "tests/loop/test_offloading_source.py",
        "tests/loop/test_route_agreement.py",
        "tests/mcore/checkpoint/test_megatron_format.py",
        "tests/mcore/checkpoint/test_owned_state.py",
        "tests/mcore/checkpoint/test_save_load.py",
        "tests/mcore/gated_delta_net/test_layer.py",
        "tests/mcore/lora/test_adapter_weights.py",
        "tests/mcore/lora/test_attach.py",
        "tests/mcore/routing_replay/test_gather_results.py",
        "tests/mcore/routing_replay/test_router_hooks.py",
        "tests/mcore/test_attention.py",
        "tests/mcore/test_expert_bias.py",
        "tests/mcore/test_hf_weights.py",
        "tests/mcore/test_meta_device.py",
        "tests/mcore/test_nothing_retained.py",
        "tests/mcore/test_offload.py",
        "tests/mcore/test_user_optimizer.py",
        "tests/mcore/test_value_steps.py",
        "tests/mcore/test_weight_sources.py",
        "tests/parallel/test_scored_rows.py",
        "tests/patches/test_megatron_on_cpu.py",
        "tests/patches/test_megatron_on_cpu_other_libraries.py",
        "tests/patches/test_moe_retained_activations.py",
        "tests/patches/test_quiet.py",
        "tests/rewards/sandbox/test_attacks.py",
        "tests/rewards/sandbox/test_case_formats.py",
        "tests/rewards/sandbox/test_code_verifier.py",
        "tests/rewards/test_scorer.py",
        "tests/rewards/test_worker_pool.py",
        "tests/rollout/embedded/test_families.py",
        "tests/rollout/server_engine/test_rollout_client.py",
        "tests/rollout/sglang/test_response_parser.py",
        "tests/rollout/test_sample_exchange.py",
        "tests/rollout/test_server_source.py",
        "tests/rollout/test_weight_sync.py",
        "tests/servers/test_server_processes.py",
        "tests/tracking/test_trackers.py",
        "tests/weight_transport/test_distributed_transport.py",
        "tests/weight_transport/test_update_group.py",
    ),
}
ALL_PARTS = (*PARTS, "unit")
# Of these, what `make test` runs too.
IN_UNIT = (
    "tests/train/test_run.py::test_a_run_writes_its_directory",
    "tests/train/test_run.py::test_a_resumed_run_ends_the_same",
    "tests/equivalence/test_layouts.py::test_moe[tp2-pp2i-cp2-dp1-ep1-etp1]",
    "tests/equivalence/test_layouts.py::test_dense[tp2nosp-pp2i-cp2-dp1]",
    "tests/equivalence/test_layouts.py::test_family[qwen35_moe-tp2-pp1-cp2-dp1-ep1-etp2]",
    "tests/equivalence/test_layouts.py::test_lora[lora_some-tp1-pp2-cp1-dp1]",
)
FILES_IN_UNIT = {test.split("::")[0] for test in IN_UNIT}


def part_of(test: str) -> str:
    """The part of a test's id, or of its file."""
    for part, prefixes in PARTS.items():
        if test.startswith(prefixes):
            return part
    return "unit"


def parts_of(text: str) -> list[str]:
    """The parts of an argument."""
    parts = text.split(",")
    for part in parts:
        if part not in ALL_PARTS:
            raise argparse.ArgumentTypeError(
                f"no part {part}; the parts are {', '.join(ALL_PARTS)}"
            )
    return parts


def chosen_parts(config) -> list[str] | None:
    """The parts that run. None: all, or the files and tests that are named on the command line."""
    return None if config.args_source is config.ArgsSource.ARGS else config.getoption("part")


def pytest_ignore_collect(collection_path, config):
    """Spares the import of the other parts' files."""
    parts = chosen_parts(config)
    if parts is None or not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    chosen = part_of(file) in parts or ("unit" in parts and file in FILES_IN_UNIT)
    return None if chosen else True


def pytest_collection_modifyitems(config, items):
    """Of the files that are in `make test` for a few of their tests, keeps these. Sorts by part."""
    parts = chosen_parts(config)
    if parts is None:
        return
    left_out = []
    kept = []
    for item in items:
        chosen = part_of(item.nodeid) in parts or ("unit" in parts and item.nodeid in IN_UNIT)
        (kept if chosen else left_out).append(item)
    items[:] = sorted(kept, key=lambda item: ALL_PARTS.index(part_of(item.nodeid)))
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """The garbage collector need not look through the millions of objects that all tests of
    this process share.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
