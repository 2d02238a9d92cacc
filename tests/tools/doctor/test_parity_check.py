"""A config on two ranks; both engines are compared."""

from __future__ import annotations

import json

from tests.support.doctor_processes import (
    TP2,
    doctor,
)


def test_a_config_on_two_ranks_with_the_engines_compared(config_file, tmp_path):
    file = config_file(model={"dtype": "float32"})
    first, second = doctor(tmp_path, str(file), TP2, "--json", "--probe", world=2)
    content = json.loads(first.out)
    assert (first.code, second.code) == (content["exit_code"], content["exit_code"]) == (0, 0), first.out
    assert second.out == ""
    by_check = {finding["check"]: finding for finding in content["findings"]}
    for check in ("groups.tp", "groups.world", "model.weights", "run.prompts", "disk.run_dir", "ranks.all"):
        assert by_check[check]["level"] == "ok", check
    assert "2 over gloo, exact" in by_check["groups.tp"]["what"]
    assert by_check["parity.log_probs"]["level"] == "ok"
    assert "known_issues.expert_gradients" in by_check or "0.19" in by_check["versions.megatron-core"]["what"]
    assert not (tmp_path / "run").exists()
