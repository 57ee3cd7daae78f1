"""Pauses between tries: ever longer, and never in step with those of others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

GROWTH = 1.5


def pauses(shortest: float, longest: float) -> Iterator[float]:
    """Seconds to wait before each further try, for ever.

    Args:
        shortest: about the first of them.
        longest: about the later ones; a fifth more or less is left to chance, so that many clients
            whom one restart has cut off do not all come back at once.
    """
    for number in itertools.count():
        # The exponent is bounded: a float is not.
        yield min(longest, shortest * GROWTH ** min(number, 100)) * random.uniform(0.8, 1.2)  # noqa: S311
