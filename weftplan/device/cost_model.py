"""`CostModel`: how long kernels and copies of a device take, for plans and for the clock of a simulated device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Virtual seconds of simulated work.

    Attributes:
        launch: default seconds of a kernel.
        latency: seconds before a copy's first byte.
        bandwidth: bytes per second of a copy.
        share: factor for the planner's estimated seconds of a bound graph's kernel, which are added to ``launch``; 0
            makes every kernel take ``launch``.
    """

    launch: float = 5e-6
    latency: float = 10e-6
    bandwidth: float = 12e9
    share: float = 1.0

    def kernel(self, modelled: float) -> float:
        """Return the seconds of a kernel that the planner's model estimates at ``modelled`` seconds."""
        return self.launch + self.share * modelled

    def copy(self, nbytes: int) -> float:
        """Return the seconds of copying ``nbytes``."""
        return self.latency + nbytes / self.bandwidth
