"""A scorer with two worker processes."""

import pytest

from megatron_gspo.rewards.scorer import RewardScorer

VERIFIER = '''
import ctypes, os, re, subprocess, sys, time
import numpy

leaked = []

class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")

def note_pid(prompt, pid):
    """In a file that is whole as soon as it is there."""
    file = prompt.metadata["file"]
    with open(file + ".part", "w") as part:
        part.write(str(pid))
    os.rename(file + ".part", file)

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
        note_pid(prompt, subprocess.Popen(["sleep", "60"]).pid)
        time.sleep(60)
    if text == "daemon":  # a double fork into a session of its own
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note_pid(prompt, os.getpid())
                time.sleep(60)
            os._exit(0)
        while not os.path.exists(prompt.metadata["file"]): time.sleep(0.01)
        return 1.0
    if text == "print":
        print("half a line", end="", flush=True)
        os.write(2, b"\\x1b[2J on stderr\\n")
        return 1.0
    if text == "escape": raise ValueError("\\x1b]0;title\\x07 \\x1b[31mred")
    if text == "leak":
        leaked.append(bytearray(64 << 20))
        return float(os.getpid())
    if text == "tensor": return numpy.ones(())
    if text == "array": return numpy.ones(2)
    if text == "score": return {"score": numpy.float64(0.5), "acc": True}
    if text == "no score": return {"acc": True}
    if text == "base": raise BaseException("rare")
    if text == "no text": raise Mute()
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "huge": return 1e300
    if text == "string": return "1.0"
    if text == "none": return None
    if text == "bool": return True
    if text == "int": return 3
    if text == "numpy": return numpy.float32(0.25)
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
