"""Seeds of random inputs, which are the same in every default run, so that a run can be repeated.

With ``TESTS_FRESH=1`` hypothesis and the damaged files use new seeds. The stress tests always use new seeds and print
them.
"""

import os

FRESH = os.environ.get("TESTS_FRESH") == "1"


def seed(*, fresh: bool = FRESH) -> int:
    """Return a 32-bit seed: a random one if ``fresh``, else the same in every run."""
    return int.from_bytes(os.urandom(4), "little") if fresh else 4152996734
