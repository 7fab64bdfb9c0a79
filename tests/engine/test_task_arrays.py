"""Vars of arrays: views, foreign buffers, arrays that have died, and other engines."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import EngineError
from weftplan.tasks.array_vars import registry


class TestVarOf:
    """``engine.var_of``, the mapping from memory to vars."""

    def test_views_share_a_var(self, driver):
        """All views of an array, also transposed or of another dtype, have one var; a copy has another."""
        whole = np.zeros((4, 6))
        var = engine.var_of(whole)
        for view in (whole[1:3], whole.T, whole.view(np.uint8), whole[:, ::2][1:], whole.reshape(-1)[5:]):
            assert engine.var_of(view) is var
        assert engine.var_of(whole.copy()) is not var
        assert var.engine is driver

    def test_foreign_buffers_share_a_var(self, driver, tmp_path: Path):
        """Arrays created separately over one bytearray, memoryview or memory map have one var."""
        text = bytearray(64)
        first, second = np.frombuffer(text, np.uint8), np.frombuffer(text, np.float64)
        assert engine.var_of(first) is engine.var_of(second[2:])
        base = np.zeros(8)
        window = memoryview(base)
        assert engine.var_of(np.asarray(window)) is engine.var_of(base)
        path = tmp_path / "data"
        path.write_bytes(bytes(64))
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 64)
        one, another = np.frombuffer(mapped, np.uint8), np.frombuffer(mapped, np.uint8, 8)
        assert engine.var_of(one) is engine.var_of(another)

    def test_subclass_views_share_a_var(self, driver, tmp_path: Path):
        """A view of a subclass has the var of its memory, also after the array that was looked up first has died."""

        class Special(np.ndarray):
            """A user's array class."""

        whole = np.zeros(8)
        view = whole.view(Special)[1:]
        var = engine.var_of(view)
        del view
        gc.collect()
        assert engine.var_of(whole) is var
        assert engine.var_of(whole.view(Special)[2:].view(np.ndarray)) is var
        alone = engine.var_of(np.zeros(8).view(Special))
        assert alone is not var
        first = np.zeros(4).view(Special)
        held, var = first[2:], engine.var_of(first)
        del first
        gc.collect()
        assert engine.var_of(held) is var
        mapped = np.memmap(tmp_path / "map", np.uint8, "w+", shape=(16,))
        assert engine.var_of(mapped[4:]) is engine.var_of(np.asarray(mapped)) is engine.var_of(mapped)

    def test_unusual_base_attributes(self, driver):
        """``var_of`` follows ``base`` to the array that owns the memory, and ignores a ``base`` that is no array."""

        class Exporter:
            """An exporter of the array interface with any ``base``; None makes it its own base."""

            def __init__(self, array, base) -> None:
                self.__array_interface__, self.array = array.__array_interface__, array
                self.base = self if base is None else base

        itself, decimal, binary = (np.asarray(Exporter(np.zeros(4), base)) for base in (None, 10, 10))
        assert len({engine.var_of(array) for array in (itself, itself[1:], decimal, binary)}) == 3
        whole = np.zeros(8)
        assert engine.var_of(np.asarray(Exporter(whole, whole))) is engine.var_of(whole)
        assert engine.var_of(np.lib.stride_tricks.as_strided(whole[2:], (2,), (16,))) is engine.var_of(whole)
        assert engine.var_of(np.broadcast_to(whole[2:], (3, 6))) is engine.var_of(whole)

    def test_ndarrays_and_vars_have_their_own(self, driver):
        """The var of an NDArray is its own ``var``, and the var of a var is the var itself."""
        array = mx.nd.zeros((2,))
        assert engine.var_of(array) is array.var
        var = driver.new_variable()
        assert engine.var_of(var) is var

    def test_entries_die_with_their_arrays(self, driver):
        """The registry keeps no array alive and drops its entry when the last array over the memory dies."""
        gc.collect()
        before = len(registry)
        whole = np.zeros(100)
        view = whole[10:]
        engine.var_of(view)
        del whole
        assert len(registry) == before + 1
        del view
        assert len(registry) == before

    def test_a_reused_address_gets_a_fresh_var(self, driver):
        """3,000 short-lived arrays that reuse a few addresses each get a new var of version 0."""
        seen = []
        for _ in range(3000):
            var = engine.var_of(np.empty(16))
            assert var.version == 0
            assert var not in seen[-1:]
            seen.append(var)
        assert len(set(map(id, seen))) == 3000

    def test_concurrent_lookups_give_one_var(self, driver):
        """Eight threads that look up one new array at the same time get one var."""
        for _ in range(50):
            whole, found, gate = np.zeros(8), [], threading.Barrier(8)

            def ask(whole=whole, found=found, gate=gate) -> None:
                gate.wait()
                found.append(engine.var_of(whole[2:]))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 8
            assert len(set(map(id, found))) == 1

    def test_finalizers_may_look_up_vars(self, driver):
        """Finalizers of reference cycles may look up vars while eight threads create and drop views.

        Some views are of memory that no array owns. No thread hangs, and the registry has no wrong entry.
        """
        gc.collect()
        kept = [np.zeros(4) for _ in range(4)]
        before, variables, errors = len(registry), [engine.var_of(array) for array in kept], []

        class Cycle:
            def __init__(self) -> None:
                self.me, self.array = self, np.zeros(2)
                engine.var_of(self.array)

            def __del__(self) -> None:
                engine.var_of(kept[0])
                engine.var_of(np.zeros(3))
                engine.var_of(np.frombuffer(bytearray(8), np.uint8))

        def churn() -> None:
            try:
                for i in range(300):
                    Cycle()
                    engine.var_of(np.zeros(8)[i % 4 :])
                    assert [engine.var_of(array[1:]) for array in kept] == variables
                    if i % 100 == 0:
                        gc.collect()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=churn) for _ in range(8)]
        thresholds = gc.get_threshold()
        gc.set_threshold(2)  # a collection, and its finalizers, at nearly every allocation
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.set_threshold(*thresholds)
        assert errors == []
        gc.collect()
        assert len(registry) == before + 4

    def test_non_arrays_are_refused(self, driver):
        """Objects that are not arrays raise EngineError with their type."""
        with pytest.raises(EngineError, match=r"NumPy or CuPy array.*got list"):
            engine.var_of([1, 2])

        class Thing:
            """An object that has a var but no memory."""

            var = driver.new_variable()

        with pytest.raises(EngineError, match="got Thing"):
            engine.var_of(Thing())

    def test_idle_array_moves_to_another_engine(self, threaded):
        """Use of a busy array on another engine raises EngineError; after a wait the array can be used there."""
        array, hold = np.zeros(2), threading.Event()
        engine.submit(lambda out: hold.wait(60), out=array)
        second = engine.create("NaiveEngine")
        with engine.using(second):
            with pytest.raises(EngineError, match=r"still used by operations on"):
                engine.submit(np.add, array, 1, out=array)
            hold.set()
            threaded.wait_for_all()
            engine.submit(np.add, array, 1, out=array)
        assert array.tolist() == [1.0, 1.0]
