"""All seeded bugs."""

from __future__ import annotations

from tests.seeded_bugs.adapters import ADAPTERS
from tests.seeded_bugs.agents import AGENTS
from tests.seeded_bugs.checkpoints import CHECKPOINTS
from tests.seeded_bugs.conversion import CONVERSION
from tests.seeded_bugs.distillation import DISTILLATION
from tests.seeded_bugs.evaluation import EVALUATION
from tests.seeded_bugs.models import MODELS
from tests.seeded_bugs.objective import OBJECTIVE
from tests.seeded_bugs.parallelism import PARALLELISM
from tests.seeded_bugs.rehearsal import REHEARSAL
from tests.seeded_bugs.rewards import REWARDS
from tests.seeded_bugs.rollouts import ROLLOUTS
from tests.seeded_bugs.routing import ROUTING
from tests.seeded_bugs.servers import SERVERS

SEEDED_BUGS = (
    *OBJECTIVE,
    *DISTILLATION,
    *PARALLELISM,
    *ROUTING,
    *CHECKPOINTS,
    *ROLLOUTS,
    *SERVERS,
    *CONVERSION,
    *MODELS,
    *ADAPTERS,
    *REWARDS,
    *AGENTS,
    *EVALUATION,
    *REHEARSAL,
)
