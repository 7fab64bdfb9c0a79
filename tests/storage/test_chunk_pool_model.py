"""Chunk pools compared with a model: a list of blocks per chunk, searched linearly.

The model shares only the rules with the pools: it keeps no order of free blocks and merges them by a scan.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.storage.small_devices import Room, layout
from weftplan.storage import AutoGrowth, NaiveBestFit

CHUNK = 1 << 16


class Model:
    """Model of a chunk pool: each chunk is a list of [bytes, name of the holder or None]."""

    def __init__(self, *, high, header, unit, chunk):
        self.high, self.header, self.unit, self.chunk = high, header, unit, chunk
        self.chunks = []
        self.direct = {}

    def allocate(self, name, nbytes):
        size = -(-(nbytes + self.header) // self.unit) * self.unit
        if not self.high and size > self.chunk:
            self.direct[name] = nbytes
            return nbytes
        fits = [
            (block[0], row, at)
            for row, blocks in enumerate(self.chunks)
            if blocks is not None
            for at, block in enumerate(blocks)
            if block[1] is None and block[0] >= size
        ]
        if fits:
            _, row, at = min(fits)
        else:
            self.chunks.append([[max(size, self.chunk), None]])
            row, at = len(self.chunks) - 1, 0
        blocks = self.chunks[row]
        remainder = blocks[at][0] - size
        if remainder > (0 if self.high else self.header):
            blocks[at : at + 1] = [[remainder, None], [size, name]] if self.high else [[size, name], [remainder, None]]
            return size
        blocks[at][1] = name
        return blocks[at][0]

    def free(self, name):
        if self.direct.pop(name, None) is not None:
            return
        for row, blocks in enumerate(self.chunks):
            merged = []
            for size, holder in blocks or ():
                holder = None if holder == name else holder
                if holder is None and merged and merged[-1][1] is None:
                    merged[-1][0] += size
                else:
                    merged.append([size, holder])
            if blocks is not None:
                self.chunks[row] = merged

    def release(self):
        for row, blocks in enumerate(self.chunks):
            if blocks is not None and len(blocks) == 1 and blocks[0][1] is None:
                self.chunks[row] = None

    @property
    def reserved(self):
        return sum(size for blocks in self.chunks for size, _ in blocks or ()) + sum(self.direct.values())

    @property
    def shape(self):
        """Return per chunk the (offset, bytes, free) of its blocks, in the form of ``layout``."""
        rows = []
        for blocks in self.chunks:
            if blocks is None:
                continue
            at, row = 0, []
            for size, holder in blocks:
                row.append((at, size, holder is None))
                at += size
            rows.append(row)
        return rows


class ChunkMachine(RuleBasedStateMachine):
    """Random calls; the blocks of the pool and of the model must be equal."""

    held = Bundle("held")
    settled = True
    """Unused flag; each free is followed by ``statistics()``, which empties the free lists."""

    def build(self):
        raise NotImplementedError

    def __init__(self):
        super().__init__()
        self.room = Room()
        self.pool, self.model = self.build()
        self.contents = {}
        self.mark = 0

    @rule(target=held, nbytes=st.one_of(st.integers(1, 3000), st.integers(1, CHUNK + 200)))
    def allocate(self, nbytes):
        """Allocate from both; check that the sizes are equal, and fill the block."""
        self.mark += 1
        allocation = self.pool.allocate(nbytes)
        assert allocation.size == self.model.allocate(self.mark, nbytes)
        allocation.raw.fill(self.mark % 251)
        self.contents[self.mark] = allocation
        return self.mark

    @rule(mark=consumes(held))
    def free(self, mark):
        """Check that the contents are intact, and free the block in both."""
        allocation = self.contents.pop(mark)
        assert (allocation.raw == mark % 251).all()
        self.pool.free(allocation)
        self.model.free(mark)
        self.pool.statistics()

    @rule()
    def empty_cache(self):
        """Check that exactly the chunks without a live block are returned."""
        before = self.model.reserved
        self.model.release()
        assert self.pool.empty_cache() == before - self.model.reserved

    @invariant()
    def same_blocks(self):
        """Check that blocks and statistics equal the model's."""
        assert layout(self.pool) == self.model.shape
        now = self.pool.statistics()
        assert now.reserved_bytes == sum(self.room.taken) == self.model.reserved
        assert now.live == len(self.contents)


class AutoGrowthMachine(ChunkMachine):
    """AutoGrowth, as in Paddle on a GPU."""

    def build(self):
        return AutoGrowth(self.room, chunk=CHUNK, unit=256), Model(high=True, header=0, unit=256, chunk=CHUNK)


class NaiveBestFitMachine(ChunkMachine):
    """NaiveBestFit with the documented rule: blocks without Paddle's header."""

    def build(self):
        return NaiveBestFit(self.room, first=CHUNK, unit=64), Model(high=False, header=0, unit=64, chunk=CHUNK)


TestAutoGrowth = AutoGrowthMachine.TestCase
TestNaiveBestFit = NaiveBestFitMachine.TestCase
TestAutoGrowth.settings = TestNaiveBestFit.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
