"""All defects: an exact piece of source text each, and what to put in its place.

Most were met in other frameworks; "design" marks those that this one could have grown itself.
"""

from __future__ import annotations

from tests.seeded_bugs.layouts import CONVERSION, LAYOUT, MEGATRON, PARALLEL, RESUME
from tests.seeded_bugs.objective import DATA, OBJECTIVE
from tests.seeded_bugs.rollouts import OF_THE_ROLLOUTS
from tests.seeded_bugs.routing import ROUTING
from tests.seeded_bugs.servers import OF_THE_SERVERS

DEFECTS = (
    OBJECTIVE + DATA + PARALLEL + CONVERSION + MEGATRON + LAYOUT + RESUME + ROUTING + OF_THE_ROLLOUTS + OF_THE_SERVERS
)
