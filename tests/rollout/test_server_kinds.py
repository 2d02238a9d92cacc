"""Every engine that runs in servers has a kind, under the name of its section."""

from __future__ import annotations

from megatron_gspo.rollout.server_kinds import SERVER_KINDS


def test_a_server_of_quantised_weights_starts_without_any():
    for kind, option in (("sglang", "--json-model-override-args"), ("vllm", "--hf-overrides")):
        args = SERVER_KINDS[kind].launch.quantized_args({"quant_method": "fp8"})
        assert args == [
            option,
            '{"quantization_config": {"quant_method": "fp8"}}',
            "--load-format",
            "dummy",
        ]
