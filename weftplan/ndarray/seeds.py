"""Keys of random draws: who draws what depends on the seed and the order of the calls alone.

Each context has a stream of keys (seed, counter); a key is taken on the calling thread.
"""

from __future__ import annotations

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import DeviceError, ParameterError
from weftplan.locks import Lock, whole_in_children

_lock = whole_in_children(Lock())
_seed = 0
_streams: dict[Context, list[int]] = {}
"""Context -> [seed, next counter]; guarded by the lock."""


def seed(seed_state: int, ctx: Context | str = "all") -> None:
    """Restart the random numbers of one context, or of all of them; two contexts never draw the same ones.

    Raises:
        ParameterError: the seed is not an integer.
        DeviceError: ``ctx`` is neither a Context nor "all".
    """
    global _seed
    if isinstance(seed_state, bool) or not isinstance(seed_state, int | np.integer):
        raise ParameterError(f"the seed must be an integer, got {seed_state!r}")
    with _lock:
        if isinstance(ctx, Context):
            _streams[ctx] = [_mixed(int(seed_state), ctx), 0]
        elif ctx == "all":
            _seed = int(seed_state)
            _streams.clear()
        else:
            raise DeviceError(f"seed: ctx must be a Context or 'all', got {ctx!r}")


def next_key(ctx: Context) -> tuple[int, int]:
    """(seed, counter) of the next draw on ``ctx``; the counter stays below 2**32 draws per seed."""
    with _lock:
        stream = _streams.get(ctx)
        if stream is None:
            stream = _streams[ctx] = [_mixed(_seed, ctx), 0]
        counter = stream[1]
        stream[1] = counter + 1
        return stream[0], counter


def _mixed(number: int, ctx: Context) -> int:
    """A seed of 63 bits for ``ctx``: the splitmix64 finaliser spreads neighbouring seeds and devices."""
    value = number * 127 + ctx.device_id + (ctx.device_typeid << 48)
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1
