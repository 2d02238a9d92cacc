"""megatron_gspo.algorithms works where only torch is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Which need the standard library alone.
LOWER = ("megatron_gspo.errors", "megatron_gspo.user_code")

BLOCKED = """
import sys
import torch

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("torch", "megatron_gspo"):
            raise ImportError(f"{name} is not torch")

sys.meta_path.insert(0, Block())
for name in [m for m in sys.modules if m.partition(".")[0] == "numpy"]:
    del sys.modules[name]  # torch brought it; the package must not count on it
try:
    import numpy
except ImportError:
    pass
else:
    raise SystemExit("the blocker does not block")

from megatron_gspo.algorithms import group_advantages, policy_loss, preset

x = torch.full((4,), -1.0)
ids = torch.tensor([0, 0, 1, 1])
a = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
loss, metrics = policy_loss(preset("gspo"), log_probs=x.clone().requires_grad_(), old_log_probs=x,
                            advantages=a[ids], loss_mask=torch.ones(4), segment_ids=ids, num_sequences=2)
loss.backward()
own = (".algorithms", ".objectives")
others = sorted(
    m for m in sys.modules if m.startswith("megatron_gspo.") and not any(part in m for part in own)
)
print("imported", others)
"""


def test_runs_with_everything_but_torch_blocked():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"imported {sorted(LOWER)}"
