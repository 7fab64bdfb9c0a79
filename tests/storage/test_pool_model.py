"""Pools compared with a model: a list of address intervals and a sum of bytes."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from weftplan import device
from weftplan.storage import NaivePool, RoundPool


class PoolMachine(RuleBasedStateMachine):
    """Random allocations and frees: live intervals must be disjoint and statistics exact."""

    held = Bundle("held")
    kind = NaivePool

    def __init__(self):
        super().__init__()
        self.pool = self.kind(device.get(device.cpu()))
        self.live = {}
        self.mark = 0
        self.peak = 0

    @rule(target=held, nbytes=st.one_of(st.integers(0, 9000), st.sampled_from([4096, 2 << 20, (2 << 20) + 1])))
    def allocate(self, nbytes):
        """Check that a new block overlaps no live block."""
        allocation = self.pool.allocate(nbytes)
        begin = allocation.raw.__array_interface__["data"][0]
        for second, (low, high, _) in self.live.items():
            assert begin + nbytes <= low or high <= begin, second
        self.mark = (self.mark + 1) % 251
        allocation.raw.fill(self.mark)
        self.live[id(allocation)] = (begin, begin + nbytes, (allocation, self.mark))
        self.peak = max(self.peak, self.requested())
        return allocation

    @rule(allocation=consumes(held))
    def free(self, allocation):
        """Check that the written contents are intact, and free the block."""
        _, _, (kept, mark) = self.live.pop(id(allocation))
        assert (kept.raw == mark).all()
        self.pool.free(allocation)

    @rule()
    def empty_cache(self):
        """Check that after the cache is emptied only live memory is reserved."""
        self.pool.empty_cache()
        now = self.pool.statistics()
        assert now.reserved_bytes == now.allocated_bytes

    def requested(self):
        """Return the live bytes of the model."""
        return sum(high - low for low, high, _ in self.live.values())

    @invariant()
    def figures_agree(self):
        """Check that the statistics equal the model's."""
        now = self.pool.statistics()
        assert now.live == len(self.live)
        assert now.requested_bytes == self.requested()
        assert now.peak_requested_bytes == self.peak
        assert now.requested_bytes <= now.allocated_bytes <= now.reserved_bytes <= now.peak_reserved_bytes
        rounded = sum(self.pool.rounded(high - low) for low, high, _ in self.live.values() if high > low)
        assert now.allocated_bytes == rounded


class RoundMachine(PoolMachine):
    """Random allocations and frees on the Round pool."""

    kind = RoundPool


TestNaive = PoolMachine.TestCase
TestRound = RoundMachine.TestCase
TestNaive.settings = TestRound.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
