"""A run whose servers fail leaves a complete checkpoint, whether it was in progress or not."""

from __future__ import annotations

from pathlib import Path

from megatron_gspo.errors import SharedEngineError
from megatron_gspo.mcore.checkpoint.checkpoint_files import complete_checkpoints
from tests.bad_input.test_rollouts import MyEngine
from tests.support.command_line import small_config, with_engine
from tests.support.training_runs import tiny_model


class LostServers(MyEngine):
    """It answers once; then it fails as servers do: on every rank."""

    answers = 1

    def generate(self, prompts, sampling, *, seed):
        if not self.answers:
            raise SharedEngineError("no server has answered")
        self.answers -= 1
        return super().generate(prompts, sampling, seed=seed)


def test_servers_that_fail_leave_a_whole_checkpoint(tmp_path):
    config = small_config(
        tiny_model(tmp_path / "model"),
        tmp_path,
        checkpoint={"save_interval": 0},
        training={"steps": 3},
    )
    outcome = with_engine(config, LostServers())
    at = Path(config["run_dir"]) / "checkpoints" / "step_000001"
    [line] = outcome.messages
    assert f"no server has answered; saved, start again to resume from {at}" in line
    assert outcome.code == 1
    assert complete_checkpoints(at.parent) == [at] and list(at.parent.iterdir()) == [at]
