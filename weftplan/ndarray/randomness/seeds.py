"""Keys of random draws, determined by the seed and the order of calls.

Each context has a stream of keys (seed, counter); a key is taken on the calling thread. A thread whose draws interleave
with others in no fixed order has its own sequence: :class:`Draws`.

A random node of a bound graph takes its key from the run's key and its rank in the forward graph
(``executor/prepared_calls.py``), so a recomputed node draws the same numbers.
"""

from __future__ import annotations

import threading
from typing import Any, Self

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import DeviceError, ParameterError
from weftplan.locks import Lock, consistent_in_children

_lock = consistent_in_children(Lock())
"""Guards ``_keys``, so that no two draws get the same counter."""


class _Keys:
    """The keys that come next, under the lock."""

    def __init__(self) -> None:
        self.seed = 0
        self.streams: dict[Context, list[int]] = {}
        """Context -> [seed, next counter]."""


_keys = _Keys()


def seed(seed_state: int, ctx: Context | str = "all") -> None:
    """Restart the random numbers of one context, or of all contexts; two contexts never draw the same numbers.

    Raises:
        ParameterError: the seed is not an integer.
        DeviceError: ``ctx`` is neither a Context nor "all".
    """
    if isinstance(seed_state, bool) or not isinstance(seed_state, int | np.integer):
        raise ParameterError(f"the seed must be an integer, got {seed_state!r}")
    with _lock:
        if isinstance(ctx, Context):
            _keys.streams[ctx] = [_mixed(int(seed_state), ctx), 0]
        elif ctx == "all":
            _keys.seed = int(seed_state)
            _keys.streams.clear()
        else:
            raise DeviceError(f"seed: ctx must be a Context or 'all', got {ctx!r}")


def next_key(ctx: Context) -> tuple[int, int]:
    """Return (seed, counter) of the next draw on ``ctx``; the counter stays below 2**32 draws per seed.

    Within ``with Draws(…):`` the key comes from that sequence.
    """
    if _generators.draws is not None:
        return _generators.draws.next_key(ctx)
    with _lock:
        stream = _keys.streams.get(ctx)
        if stream is None:
            stream = _keys.streams[ctx] = [_mixed(_keys.seed, ctx), 0]
        counter = stream[1]
        stream[1] = counter + 1
        return stream[0], counter


def get_state() -> dict[str, object]:
    """Return the state of the random numbers of all contexts, as plain values for :func:`set_state`."""
    with _lock:
        streams = sorted((ctx.device_type, ctx.device_id, *stream) for ctx, stream in _keys.streams.items())
        return {"seed": _keys.seed, "streams": [list(stream) for stream in streams]}


def set_state(state: dict[str, Any]) -> None:
    """Restore a state of :func:`get_state`, so that every context continues with the same draws.

    Raises:
        ParameterError: ``state`` is no result of :func:`get_state`. Nothing is changed then.
    """
    try:
        seed = int(state["seed"])
        streams = {
            Context(str(kind), int(number)): [int(start), int(counter)]
            for kind, number, start, counter in state["streams"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ParameterError(f"this is no state of random numbers: {error!r}") from error
    with _lock:
        _keys.seed = seed
        _keys.streams.clear()
        _keys.streams.update(streams)


def _mixed(number: int, ctx: Context) -> int:
    """Return a seed of 63 bits for ``ctx``; the splitmix64 finalizer spreads neighbouring seeds and devices."""
    value = number * 127 + ctx.device_id + (ctx.device_typeid << 48)
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1


class Draws:
    """An independent sequence of keys: ``with draws:`` gives this thread the next keys, whatever other threads draw.

    Args:
        seed, counter: a key, such as the result of :func:`next_key`; a different key gives different draws.
        drawn: the number of keys taken already.

    >>> from weftplan.device.context import cpu
    >>> with Draws(7, 0) as draws:
    ...     first = next_key(cpu())
    >>> with Draws(7, 0):
    ...     assert next_key(cpu()) == first
    >>> draws.state()
    [7, 0, 1]
    """

    def __init__(self, seed: int, counter: int, drawn: int = 0) -> None:
        self._start = (seed, counter)
        self._drawn = drawn

    def next_key(self, ctx: Context) -> tuple[int, int]:
        """Return the next key, for a draw on ``ctx``."""
        seed, counter = self._start
        drawn, self._drawn = self._drawn, self._drawn + 1
        return _mixed(seed ^ counter * 0x9E3779B97F4A7C15, ctx), drawn

    def state(self) -> list[int]:
        """Return the state from which :meth:`of` makes the rest of the sequence."""
        return [*self._start, self._drawn]

    @classmethod
    def of(cls, state: object) -> Self:
        """Make the rest of a sequence from its state.

        Raises:
            ParameterError: ``state`` is not a list or tuple of three integers.
        """
        if not isinstance(state, (list, tuple)) or len(state) != 3 or any(type(part) is not int for part in state):
            raise ParameterError(f"the state of draws must be three whole numbers, got {state!r:.80}")
        return cls(*state)

    def __enter__(self) -> Self:
        self._outer, _generators.draws = _generators.draws, self
        return self

    def __exit__(self, *exc: object) -> None:
        _generators.draws = self._outer


class _ThreadGenerators(threading.local):
    draws: Draws | None = None


_generators = _ThreadGenerators()
