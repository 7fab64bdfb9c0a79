"""Multi-threaded array programs in a fraction of their memory; the remainder is offloaded.

Each thread has arrays and a NumPy model of them; all threads share the memory. Meanwhile the limit is lowered and
raised, arrays are dropped during their copies, and in some trials offload targets refuse copies at random, as if a disk
were full for a moment. An array may then have that error, but no other; all other arrays have the right values. At the
end no memory is live.
"""

from __future__ import annotations

import atexit
import functools
import gc
import random
import shutil
import tempfile
import threading
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

import weftplan as mx
from weftplan import device, engine, storage
from weftplan.engine.simulator import Simulator
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.spill import spilling
from weftplan.storage import AutoGrowth, LimitResource, NaivePool, offload

ELEMENTS = 2048
SIZE = 4 * ELEMENTS
"""Bytes of an array in this file."""
MOST = 3
"""Maximum number of arrays per operation."""


@functools.cache
def folder() -> str:
    """Return the process's temporary folder for offload files, which is removed at exit."""
    temporary = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def make_engine(name: str, seed: int) -> Any:
    """Return a new engine of the kind ``name``; threaded engines have one to four workers, depending on ``seed``."""
    return Simulator(seed=seed) if name == "Simulator" else engine.create(name, cpu_workers=1 + seed % 4)


class Program:
    """The random program of one thread, with its arrays and their expected values."""

    def __init__(self, seed: str, ctx: mx.Context, count: int, steps: int, faults: bool) -> None:
        self.rng = random.Random(seed)
        self.ctx = ctx
        self.steps = steps
        self.faults = faults
        self.wrong: list[str] = []
        self.refusals = 0
        self.values = [np.full(ELEMENTS, self.rng.randrange(100), "float32") for _ in range(count)]
        self.arrays: list[Any] = [None] * count

    def run(self) -> None:
        """Run all steps, then check every array; record errors in ``wrong``."""
        try:
            for k in range(len(self.arrays)):
                self.renew(k)
            for _ in range(self.steps):
                self.step()
            for k in range(len(self.arrays)):
                self.look(k)
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self.arrays.clear()

    def step(self) -> None:
        """Run one random statement on the arrays and on the model."""
        rng, xs, vs = self.rng, self.arrays, self.values
        i, j, k = (rng.randrange(len(xs)) for _ in range(3))
        what = rng.randrange(7)
        try:
            if what == 0:
                xs[i] += xs[j]
                vs[i] = vs[i] + vs[j]
            elif what == 1:
                xs[k] = xs[i] - xs[j] * 0.5
                vs[k] = vs[i] - vs[j] * np.float32(0.5)
            elif what == 2:
                xs[k] = mx.nd.maximum(xs[i], xs[j])
                vs[k] = np.maximum(vs[i], vs[j])
            elif what == 3:
                xs[k][:] = xs[i]
                vs[k] = vs[i].copy()
            elif what == 4:
                xs[k][5:1100] = xs[i][5:1100] + 1
                vs[k] = vs[k].copy()
                vs[k][5:1100] = vs[i][5:1100] + 1
            elif what == 5:
                self.renew(k)
            else:
                self.look(i)
        except OutOfMemoryError:  # on an inline engine
            if not self.faults:
                raise
            self.renew_all()

    def renew_all(self) -> None:
        """Replace all arrays after an OutOfMemoryError, because any of them may have inherited it."""
        self.refusals += 1
        for k in range(len(self.arrays)):
            self.renew(k)

    def renew(self, k: int) -> None:
        """Replace array ``k`` and its expected value; in trials with faults, repeat until the allocation succeeds."""
        self.values[k] = np.full(ELEMENTS, self.rng.randrange(100), "float32")
        self.arrays[k] = None
        while True:
            try:
                self.arrays[k] = mx.nd.array(self.values[k], ctx=self.ctx)
                self.arrays[k].wait_to_read()
                return
            except OutOfMemoryError:
                self.refusals += 1
                if not self.faults:
                    raise

    def look(self, k: int) -> None:
        """Check that array ``k`` has the model's values; an OutOfMemoryError is allowed in trials with faults."""
        try:
            values = self.arrays[k].asnumpy()
        except OutOfMemoryError:
            if not self.faults:
                raise
            self.renew_all()
            return
        if not np.array_equal(values, self.values[k], equal_nan=True):
            self.wrong.append(f"array {k}: {values[:3]} for {self.values[k][:3]}")


def trial(seed: str) -> bool:
    """Run one to three programs at the same time in one memory; check their values and that no memory stays live."""
    rng = random.Random(seed)
    kind = rng.choice(("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"))
    threads = 1 if kind == "Simulator" else rng.randint(1, 3)
    # Each thread may be in an operation and hold a new array that cannot be spilled yet.
    room = MOST + threads + rng.randint(0, 4)
    count = rng.randint(room // threads + 1, 2 * room)
    ctx = mx.cpu(9500) if rng.random() < 0.5 else mx.sim(150)
    file = f"file:{folder()}"
    listed = [file, f"file:{folder()}"] if ctx.device_type == "cpu" else [file, "host", f"host:{3 * SIZE}B,{file}"]
    faults = rng.random() < 0.3
    chance = random.Random(f"{seed}, faults")
    keep = offload.offload

    def sometimes(*args: Any, **how: Any) -> Any:
        if chance.random() < 0.05:
            raise OutOfMemoryError("the offload target is full for a moment")
        return keep(*args, **how)

    waiting, result = offload.waiting_bytes(), make_engine(kind, rng.randrange(1 << 20))
    pool = LimitResource(rng.choice((NaivePool, AutoGrowth))(device.get(ctx)), room * SIZE)
    with ExitStack() as stack:
        stack.enter_context(engine.using(result))
        stack.enter_context(spilling.using(rng.choice(listed)))
        stack.enter_context(storage.using(pool))
        if faults:
            stack.enter_context(mock.patch.object(offload, "offload", sometimes))
        programs = [Program(f"{seed}/{n}", ctx, count, rng.randint(10, 60), faults) for n in range(threads)]
        running = [threading.Thread(target=program.run, daemon=True) for program in programs]
        for thread in running:
            thread.start()
        for thread in running:
            while thread.is_alive():
                pool.limit = rng.randint(MOST + threads, room) * SIZE
                thread.join(0.01)
        wrong = [f"on {kind}, {ctx}, {threads} threads: {one}" for program in programs for one in program.wrong]
        assert not wrong, wrong[:3]
        for _ in range(3):
            gc.collect()
            try:
                mx.nd.waitall()
            except MXNetError:
                assert faults
        assert not joint_allocation._looks, "a look has not ended"
        held = pool.statistics().requested_bytes
        assert held == 0, f"{held} bytes are held at the end"
    assert offload.waiting_bytes() == waiting, "bytes wait in an offload target for nobody"
    result.stop()
    return True
