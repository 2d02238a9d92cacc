"""All seeded bugs. `seen_in="design"`: a mistake that this design makes possible; the others were seen in real code."""

from __future__ import annotations

from tests.seeded_bugs.adapters import ADAPTERS
from tests.seeded_bugs.delta_nets import DELTA_NETS
from tests.seeded_bugs.evaluation import EVALUATION
from tests.seeded_bugs.families import OF_THE_FAMILIES
from tests.seeded_bugs.family_engines import FAMILY_ENGINES
from tests.seeded_bugs.joint_norms import JOINT_NORMS
from tests.seeded_bugs.layouts import CONVERSION, LAYOUT, MEGATRON, PARALLEL, RESUME
from tests.seeded_bugs.objective import DATA, OBJECTIVE
from tests.seeded_bugs.plans import PLANS
from tests.seeded_bugs.quantization import QUANTIZATION
from tests.seeded_bugs.qwen35 import OF_QWEN35
from tests.seeded_bugs.rollouts import OF_THE_ROLLOUTS
from tests.seeded_bugs.routing import ROUTING
from tests.seeded_bugs.sandbox import OF_THE_SANDBOX
from tests.seeded_bugs.servers import OF_THE_SERVERS
from tests.seeded_bugs.sinks_and_windows import BIASED_EXPERTS, SINKS_AND_WINDOWS

GROUPS = {
    "OBJECTIVE": OBJECTIVE, "DATA": DATA, "PARALLEL": PARALLEL, "CONVERSION": CONVERSION, "MEGATRON": MEGATRON,
    "LAYOUT": LAYOUT, "RESUME": RESUME, "ROUTING": ROUTING, "OF_THE_ROLLOUTS": OF_THE_ROLLOUTS,
    "OF_THE_SERVERS": OF_THE_SERVERS, "OF_THE_FAMILIES": OF_THE_FAMILIES, "SINKS_AND_WINDOWS": SINKS_AND_WINDOWS,
    "BIASED_EXPERTS": BIASED_EXPERTS, "OF_THE_SANDBOX": OF_THE_SANDBOX,
    "DELTA_NETS": DELTA_NETS, "EVALUATION": EVALUATION, "ADAPTERS": ADAPTERS,
    "QUANTIZATION": QUANTIZATION, "JOINT_NORMS": JOINT_NORMS, "PLANS": PLANS,
    "OF_QWEN35": OF_QWEN35, "FAMILY_ENGINES": FAMILY_ENGINES,
}  # fmt: skip
SEEDED_BUGS = tuple(bug for bugs in GROUPS.values() for bug in bugs)
