"""Seeds of random inputs: the same in every default run, so that a run can be repeated.

With ``TESTS_FRESH=1`` hypothesis and the damaged files use new seeds; the stress tests always do, and print their seed.
"""

import os

FRESH = os.environ.get("TESTS_FRESH") == "1"


def seed(*, fresh: bool = FRESH) -> int:
    """Return a seed of 32 bits: the same in every run, or a new one."""
    return int.from_bytes(os.urandom(4), "little") if fresh else 4152996734
