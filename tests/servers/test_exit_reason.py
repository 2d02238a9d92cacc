"""Why a server ended, in one line."""

from __future__ import annotations

import pytest

from megatron_gspo.rollout.sglang.sglang_launch import SGLangLaunch
from megatron_gspo.servers.exit_reason import exit_reason


# Last lines of real logs, of versions 0.5.23 and 0.5.15.post1
@pytest.mark.parametrize(
    "log, code, said",
    [
        (
            (
                "[Errno 98] error while attempting to bind on address ('127.0.0.1', 31101): address"
                " already in use\nbye"
            ),
            1,
            "its port is in use; choose another sglang.port",
        ),
        (
            (
                "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments:"
                " --no-such 1"
            ),
            2,
            (
                "correct sglang.server_args ('launch_server.py: error: unrecognized arguments:"
                " --no-such 1')"
            ),
        ),
        (
            (
                "ValueError: Currently only ['fa3', 'triton'] attention backends are supported for"
                " deterministic inference, but you explicitly specified 'torch_native'."
            ),
            1,
            (
                'or leave out --enable-deterministic-inference ("ValueError: Currently only'
                " ['fa3', 'triton']"
            ),
        ),
        (
            "/env/bin/python: No module named sglang.launch_server",
            1,
            "name another interpreter in sglang.python",
        ),
        (
            (
                "INFO (/v1/responses) disabled (ModuleNotFoundError: No module named"
                " 'openai_harmony')\nRuntimeError: odd"
            ),
            1,
            "it exited with code 1; the end of its log: INFO",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
            1,
            "it ran out of memory; lower --mem-fraction-static",
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header",
            1,
            "check the model path",
        ),
        (
            "serving",
            137,
            "it was killed by SIGKILL, which is how Linux ends a process when memory runs out",
        ),
        (
            (
                "RuntimeError: 0 active drivers ([]).\n[09:20:56] SIGQUIT"
                " received.\nkill_process_tree called"
            ),
            137,
            "it failed with 'RuntimeError: 0 active drivers ([]).'; the end of its log: ",
        ),
        ("serving", 134, "it was ended by signal 6; the end of its log: serving"),
        ("a\n\nb\nc\nd\n", 3, "it exited with code 3; the end of its log: b | c | d"),
        ("", 0, "it exited with code 0; the end of its log: empty"),
        (
            "loading",
            None,
            "it did not answer within sglang.start_timeout; the end of its log: loading",
        ),
    ],
)
def test_the_end_of_a_server_is_explained_in_a_line(log, code, said):
    line = exit_reason(log, code, SGLangLaunch.exit_causes, section="sglang")
    assert said in line and "\n" not in line
