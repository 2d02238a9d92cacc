"""How long a client waits before it asks again."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_RANDOM = random.Random()  # verifiers draw from the global one, which a run seeds


@dataclass(frozen=True)
class Backoff:
    """Waits that double from failure to failure.

    first: seconds after the first failure, at most. longest: seconds that no wait exceeds.
    """

    first: float
    longest: float = math.inf

    def seconds(self, failures: int) -> float:
        """The wait after so many failures in a row, at least 1.

        It is between half and all of `first * 2**(failures - 1)`, at random, so that requests that
        failed together do not come back together.
        """
        try:
            doubled = math.ldexp(self.first, failures - 1)
        except OverflowError:
            doubled = math.inf
        return min(doubled, self.longest) * _RANDOM.uniform(0.5, 1.0)
