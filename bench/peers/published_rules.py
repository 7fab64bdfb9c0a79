"""The rules of other allocators, as their documentation publishes them, on our blocks: for traces, not for programs.

* PyTorch's caching allocator (2.x, "CUDA semantics" and the comments of its allocator): sizes are multiples of 512
  bytes; requests up to 1 MiB are cut from segments of 2 MiB, those up to 10 MiB from segments of 20 MiB, larger
  requests have a segment of their own, a multiple of 2 MiB; the two kinds do not mix; best fit; a rest is cut off
  from 512 bytes on among the small, and beyond 1 MiB among the large.
* RMM's pool (0.20 and later): multiples of 256 bytes; a coalescing best fit from a pool that grows by as much as it
  has, or by the request if that is more; it begins with 1 MiB here, since its default is a share of a GPU.
* CuPy's pool: multiples of 512 bytes, best fit among chunks of exactly what was asked for, every rest is cut off.
"""

from weftplan.storage.chunks import ChunkPool, up

MIB = 1 << 20


class Rule(ChunkPool):
    """Best fit; the request takes the low end."""

    unit_bytes, least_rest = 512, 1

    def __init__(self, device):
        super().__init__(device, unit=self.unit_bytes)

    def _keeps(self, nbytes):
        return False

    def segment(self, size):
        """Return the bytes by which the pool grows for a request."""
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
    """CuPy's."""


class Rmm(Rule):
    """RMM's."""

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
    """PyTorch's: two pools; neither gives anything back before the device is full."""

    def __init__(self, device):
        self.pools = _TorchSmall(device), _TorchLarge(device)

    def allocate(self, nbytes):
        """From the pool of the size."""
        return self.pools[nbytes > MIB].allocate(nbytes)

    def free(self, allocation):
        """To the pool of the size."""
        self.pools[allocation.nbytes > MIB].free(allocation)

    def reserved(self):
        """Most bytes held: both pools only grow."""
        return sum(pool.statistics().peak_reserved_bytes for pool in self.pools)
