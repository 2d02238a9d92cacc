"""The documentation: its code runs, its links resolve, and what it cites exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.structure.citations import Project, missing

ROOT = Path(__file__).parents[1]
PROJECT = Project(ROOT)  # for all pages, since it reads every source file
PAGES = sorted((*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "families").glob("*.md")))
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "patches/README.md")
CITING = [*PAGES, *(ROOT / name for name in OTHER_PAGES)]
# What a page cites of other projects, and names that it invents for an example.
OF_OTHERS = {
    "CONTRIBUTING.md": {"a/b.py", "tests/a/test_b.py"},
    "docs/algorithms.md": {"V_it", "g_i", "m_it", "rollout_it"},
    "docs/conversion.md": {"--dist-ckpt-strictness"},
    "docs/distillation.md": {"--max-logprobs"},
    "docs/data.md": {"train.csv"},
    "docs/first_run.md": {"reward.py"},
    "docs/launch.md": {"GraceTime"},
    "docs/other_trainers.md": {
        "--apply-chat-template",
        "--apply-chat-template-kwargs",
        "--clip-grad",
        "--custom-rm-path",
        "--dynamic-sampling-filter-path",
        "--eval-interval",
        "--eval-prompt-data",
        "--hf-checkpoint",
        "--input-key",
        "--kl-coef",
        "--kl-loss-coef",
        "--label-key",
        "--lr",
        "--max-tokens-per-gpu",
        "--n-samples-per-eval-prompt",
        "--n-samples-per-prompt",
        "--num-rollout",
        "--prompt-data",
        "--rm-type",
        "--rollout-max-prompt-len",
        "--rollout-batch-size",
        "--rollout-max-response-len",
        "--rollout-seed",
        "--rollout-shuffle",
        "--rollout-temperature",
        "--save",
        "--save-interval",
        "--tool-key",
        "--use-kl-loss",
        "--use-wandb",
        "--wandb-project",
        "algorithm.adv_estimator",
        "algorithm.filter_groups.enable",
        "algorithm.kl_ctrl.kl_coef",
        "chat_template_kwargs",
        "data.apply_chat_template_kwargs",
        "data.filter_overlong_prompts",
        "data.max_response_length",
        "data.seed",
        "data.train_batch_size",
        "data.train_files",
        "data.truncation",
        "data.val_files",
        "eval_dataset",
        "eval_steps",
        "generation_batch_size",
        "num_generations_eval",
        "num_iterations",
        "reward_funcs",
        "rollout.n",
        "save_steps",
        "shuffle_dataset",
    },
    "docs/peers.md": {"ppo_utils.py"},
    "patches/README.md": {
        "distributed/param_and_grad_buffer.py",
        "kernels/ops/kvcache/cache_move.py",
        "optimizer/clip_grads.py",
        "optimizer/distrib_optimizer.py",
        "pipeline_parallel/p2p_communication.py",
        "pipeline_parallel/schedules.py",
        "srt/utils/common.py",
        "tensor_parallel/layers.py",
        "tensor_parallel/mappings.py",
        "tensor_parallel/random.py",
        "transformer/dot_product_attention.py",
        "transformer/moe/moe_utils.py",
        "transformer/moe/token_dispatcher.py",
        "transformer/torch_norm.py",
        "dp_reshardable",
        "load_tensors_metadata",
    },
}
NEEDS_A_WORLD = (  # blocks that start process groups; examples/ holds the tested ones
    "megatron_gspo.mcore"
)


def blocks(page: Path) -> list[str]:
    """The python blocks of a page, dedented (a list item indents its own)."""
    blocks_of_page = re.findall(
        r"^( *)```python\n(.*?)^ *```$",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    return [
        "\n".join(line.removeprefix(indent) for line in code.splitlines())
        for indent, code in blocks_of_page
    ]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [page for page in (ROOT / "README.md", *PAGES) if blocks(page)],
    ids=lambda page: page.stem,
)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {}
    for number, code in enumerate(blocks(page), start=1):
        source = compile(code, f"{page.name} block {number}", "exec")
        if NEEDS_A_WORLD not in code:
            exec(source, namespace)  # noqa: S102 (our own pages)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_figures_of_benchmarks_name_a_committed_result(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    results = re.findall(r"benchmarks/results/([\w.-]+\.json)", text)
    for name in results:
        assert (ROOT / "benchmarks" / "results" / name).is_file(), f"{page.name}: no {name}"
    scripts = re.findall(r"\bbenchmarks/(\w+\.py)", text)
    assert results or not scripts, (
        f"{page.name} has figures of {scripts[0]}; name the result that they are from"
    )


def strings_of(source: Path) -> list[str]:
    """The texts of a module, with a line break in place of each value."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    texts = []
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = [part.value if isinstance(part, ast.Constant) else None for part in parts]
        texts.append("".join(part if isinstance(part, str) else "\n" for part in values))
    return texts


def test_messages_that_are_quoted_by_hand_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- messages: (.|\n)+?<!-- /messages -->", "", page)
    tables = re.findall(r"^\| message contains .*\n((?:\|.*\n)+)", by_hand, flags=re.MULTILINE)
    messages = re.findall(r"^\| `([^`]+)`", "".join(tables), flags=re.MULTILINE)
    sources = [
        path for name in ("megatron_gspo", "patches") for path in (ROOT / name).rglob("*.py")
    ]
    texts = [text for source in sources for text in strings_of(source)]
    assert messages
    for message in messages:
        pieces = message.split("...")
        assert any(all(piece in text for piece in pieces) for text in texts), message


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", CITING, ids=page_name)
def test_what_a_page_cites_exists(page: Path) -> None:
    allowed = OF_OTHERS.get(page_name(page), set())
    assert [fault for fault in missing(PROJECT, page) if fault.split()[-1] not in allowed] == []
