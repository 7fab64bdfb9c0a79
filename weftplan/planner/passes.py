"""What changed a network before its memory was planned: the passes that ran, in their order. Data alone."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One pass over a graph."""

    name: str
    """What it does, such as ``equal expressions merged``."""
    changed: str
    """What it changed, in words; empty where it found nothing to change."""
    switch: str
    """The variable that switches it off when it is 0, or the function whose call it was."""

    @property
    def text(self) -> str:
        """One line: what it changed, and what switches it off."""
        return f"{self.name}: {self.changed or 'nothing to change'} ({self.switch})"
