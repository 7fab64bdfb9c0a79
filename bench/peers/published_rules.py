"""Models of other allocators, after their published rules, for the traces of ``bench_storage.py``; not for programs.

* PyTorch's caching allocator (2.x, "CUDA semantics" and the comments of its allocator): sizes are multiples of 512
  bytes. Requests up to 1 MiB are cut from segments of 2 MiB, requests below 10 MiB from segments of 20 MiB; a larger
  request has its own segment, a multiple of 2 MiB. Small and large segments do not mix. Best fit; the remainder of a
  block is split off if it has at least 512 bytes (small segments) or more than 1 MiB (large segments).
* RMM's pool (0.20 and later): multiples of 256 bytes; coalescing best fit from a pool that grows by its own size, or by
  the request if that is larger. The model begins with 1 MiB, since RMM's default is a share of a GPU.
* CuPy's pool: multiples of 512 bytes; best fit among chunks of exactly the requested size; every remainder is split
  off.
"""

from weftplan.storage.mergeable_chunks import ChunkPool, up

MIB = 1 << 20


class Rule(ChunkPool):
    """A best-fit pool with settings for one allocator; a request takes the low end of its block."""

    unit_bytes, least_rest = 512, 1

    def __init__(self, device):
        super().__init__(device, unit=self.unit_bytes)

    def _keeps(self, nbytes):
        return False

    def segment(self, size):
        """Return the bytes by which the pool grows for a request of ``size`` bytes."""
        return size

    def _take(self, nbytes):
        size = up(nbytes, self.unit)
        block = self._best_fit(size)
        if block is None:
            block = self._grow(self.segment(size))
        if block.size - size >= self.least_rest:
            block = self._split(block, size, high=False)
        return block, self._view(block, nbytes), block.size


class Cupy(Rule):
    """CuPy's pool: the default settings of :class:`Rule`."""


class Rmm(Rule):
    """RMM's pool."""

    unit_bytes = 256

    def segment(self, size):
        return max(size, self._reserved, MIB)


class _TorchSmall(Rule):
    least_rest = 512

    def segment(self, size):
        return 2 * MIB


class _TorchLarge(Rule):
    least_rest = MIB + 1

    def segment(self, size):
        return 20 * MIB if size < 10 * MIB else up(size, 2 * MIB)


class Torch:
    """PyTorch's allocator: a pool for requests up to 1 MiB and a pool for larger requests; neither returns memory."""

    def __init__(self, device):
        self.pools = _TorchSmall(device), _TorchLarge(device)

    def allocate(self, nbytes):
        """Allocate from the pool for this size."""
        return self.pools[nbytes > MIB].allocate(nbytes)

    def free(self, allocation):
        """Free into the pool for this size."""
        self.pools[allocation.nbytes > MIB].free(allocation)

    def reserved(self):
        """Return the peak of reserved bytes, which is their current number, since both pools only grow."""
        return sum(pool.statistics().peak_reserved_bytes for pool in self.pools)
