"""A scorer with two worker processes."""

import pytest

from megatron_gspo.rewards.scorer import RewardScorer

VERIFIER = '''
import ctypes, os, re, subprocess, sys, time

def judge(text, prompt):
    """The response selects what the verifier does."""
    print("noise on standard output")
    if text == "raise": raise ValueError("no such\\nthing")
    if text == "exit": sys.exit(3)
    if text == "die": os._exit(7)
    if text == "segfault": ctypes.string_at(0)
    if text == "sleep": time.sleep(60)
    if text == "regex": return float(bool(re.match("(a+)+$", "a" * 60 + "b")))  # holds the interpreter lock
    if text == "child":
        open(prompt.metadata["file"], "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "huge": return 1e300
    if text == "string": return "1.0"
    if text == "none": return None
    if text == "bool": return True
    if text == "int": return 3
    if text == "numpy":
        import numpy
        return numpy.float32(0.25)
    if text == "torch": return float("torch" in sys.modules)
    if text == "pid": return os.getpid()
    return float(text == prompt.answer)
'''


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifier") / "judge.py"
    path.write_text(VERIFIER)
    return f"{path}:judge"


@pytest.fixture(scope="module")
def scorer(verifier):
    with RewardScorer(verifier, timeout=2.0, workers=2, failure_reward=-1.0) as scorer:
        yield scorer
