"""The examples of tiny models can be rehearsed as shipped; `test_ready_configs` has those of
published models.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
import yaml

from megatron_gspo.config import load_config

from .on_fake_gpu import on_fake_gpu
from .test_rehearse_rank import MODEL

EXAMPLES = Path(__file__).parents[3] / "examples"
PUBLISHED = {folder.name for folder in EXAMPLES.glob("*/models/*")}


def tiny_examples() -> list[Path]:
    """Configs of runs whose model is made by the user."""
    found = {
        file: yaml.safe_load(file.read_text())
        for file in sorted(EXAMPLES.glob("*/*.yaml"))
        if re.search("^model:", file.read_text(), re.MULTILINE)
    }
    return [
        file for file, data in found.items() if Path(data["model"]["path"]).name not in PUBLISHED
    ]


@pytest.mark.slow  # ten seconds; .ci/run runs it
@on_fake_gpu
def test_a_rank_of_each() -> None:
    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
    from megatron_gspo.tools.rehearse.rehearse_rank import rehearse_rank

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL))
    for file in tiny_examples():
        world = int(re.search(r"^# processes: (\d+)$", file.read_text(), re.MULTILINE)[1])  # type: ignore[index]
        config = load_config(str(file), [f"model.path={folder}"])
        gpu = FakeGpu(expert_parallel=config.parallel.expert_model_parallel_size)
        with fake_cuda(gpu.host):
            record = rehearse_rank(config, world - 1, world, gpu)
        assert not [finding for finding in record.findings if finding.is_defect], file
        assert {"forward_backward", "optimizer"} <= set(record.phases), file
        assert ("ep" in {one.group for one in record.collectives}) == (gpu.expert_parallel > 1), (
            file
        )


def test_no_tiny_example_is_left_out() -> None:
    names = {f"{file.parent.name}/{file.stem}" for file in tiny_examples()}
    assert names == {
        "code/cold_start",
        "code/gspo",
        "collapse/cold_start",
        "collapse/counting",
        "environments/spell_backward",
        "qwen3_moe/tiny_cold_start",
        "qwen3_moe/tiny_grpo_r2",
        "qwen3_moe/tiny_gspo",
    }
