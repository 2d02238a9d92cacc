"""What the doctor says about the sandbox."""

import pytest

from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import Mechanism, Setup
from megatron_gspo.rewards.sandbox.isolation import GUARANTEES, Isolation
from megatron_gspo.tools.doctor.sandbox_checks import _judge_server, check_sandbox, judge_isolation
from tests.rewards.sandbox.fusion_server import fusion_server


def isolation(name, guarantees):
    return Isolation(Setup(Mechanism(name, False), ()), guarantees)


@pytest.mark.parametrize(
    ("used", "required", "level"), [(False, True, "note"), (True, True, "error"), (True, False, "warning")]
)
def test_a_lack_is_judged_by_its_use(used, required, level):
    finding = judge_isolation(isolation("limits", ("network",)), used=used, required=required)
    assert finding.level == level and finding.what == "limits isolates network"
    assert finding.fix.startswith("install bubblewrap")


def test_a_full_isolation_is_ok():
    finding = judge_isolation(isolation("bubblewrap", GUARANTEES), used=True, required=True)
    assert finding.level == "ok"
    assert finding.what == "bubblewrap (user namespace) isolates file system, network, processes, system calls"


def test_this_machine_has_a_finding():
    (finding,) = check_sandbox(None)
    assert finding.check == "machine.sandbox" and finding.level in ("ok", "note")


def test_a_server_runs_a_program():
    with fusion_server() as server:
        assert _judge_server(CodeConfig(sandbox_url=server.url)).level == "ok"
        wrong = {"status": "Finished", "return_code": 0, "stdout": "6\n", "stderr": ""}
        server.faults = [{"status": "Success", "run_result": wrong}]
        assert _judge_server(CodeConfig(sandbox_url=server.url)).level == "error"
