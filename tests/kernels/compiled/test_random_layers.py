"""Random convolutions and deconvolutions against their definition.

``tests.stress.trials convolutions`` tries more.
"""

from __future__ import annotations

import pytest

from tests.stress import convolutions

pytest.importorskip("llvmlite")


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_against_the_definition_in_float64(first: int) -> None:
    """Outputs and gradients of fifteen random layers equal the float64 definition.

    The layers vary axes (one to three), strides, dilations, groups, bands, slices and parts.
    """
    for number in range(first, first + 15):
        convolutions.trial(f"convolutions/1/{number}")
