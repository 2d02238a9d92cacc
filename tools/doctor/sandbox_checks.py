"""The sandbox of the verifier `code`: how this machine isolates programs, or whether the server runs them."""

from __future__ import annotations

from megatron_gspo.config import Config
from megatron_gspo.config.code_section import CodeConfig
from megatron_gspo.rewards.sandbox.command import SandboxError
from megatron_gspo.rewards.sandbox.fusion_client import FusionSandbox
from megatron_gspo.rewards.sandbox.isolation import Isolation, find_interpreter, find_isolation
from megatron_gspo.rewards.sandbox.sandboxes import describe_lack
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok, warning

_CHECK = "machine.sandbox"


def check_sandbox(config: Config | None) -> list[Finding]:
    """Runs a small program. config: the run's; None, or one with another verifier: what this machine could do."""
    used = config is not None and config.data.resolved_verifier == "code"
    code = config.data.code if config is not None and used else CodeConfig()
    try:
        if code.sandbox_url is not None:
            return [_judge_server(code)]
        isolation = find_isolation(find_interpreter(code.python))
    except SandboxError as failure:
        kind = error if used else note
        return [kind(_CHECK, str(failure), "the verifier code can't run programs", "see docs/code_rewards.md")]
    return [judge_isolation(isolation, used=used, required=code.require_isolation)]


def judge_isolation(isolation: Isolation, *, used: bool, required: bool) -> Finding:
    """used: the run has the verifier code. required: its `require_isolation`."""
    if not isolation.missing:
        return ok(_CHECK, isolation.describe())
    if not used:
        kind, effect = note, "the verifier code would refuse to start"
    elif required:
        kind, effect = error, "the verifier code refuses to start"
    else:
        kind, effect = warning, "programs of the model can reach beyond their directory"
    return kind(_CHECK, isolation.describe(), effect, describe_lack(isolation).partition("; ")[2])


def _judge_server(code: CodeConfig) -> Finding:
    outcome = FusionSandbox(CodeConfig(sandbox_url=code.sandbox_url)).prepare("print(2 + 3)")("")
    if outcome.stdout.strip() == b"5":
        return ok(_CHECK, f"{code.sandbox_url} runs programs")
    text = f"{code.sandbox_url} printed {outcome.stdout[:40]!r} for print(2 + 3)"
    return error(_CHECK, text, "its verdicts would be wrong", "check the server")
