"""Interrupts at each loop end inside the region: the final state equals that of a run without an interrupt.

``test_interrupts.py`` sends real signals at every place where the interpreter accepts them. This file tests each place
in turn, with many readers and writers: the interrupt comes when a loop over an operation's vars advances.
"""

import random
from contextlib import suppress
from functools import partial

import pytest

from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.engine.operation import OprBlock

CELLS = 5


class Boom(Exception):
    """The error of failing operations; its argument is the operation's number."""


class Vars(tuple):
    """Vars of an operation; the next iteration raises KeyboardInterrupt before the var with number ``at``."""

    at = None

    def __iter__(self):
        at, self.at = self.at, None
        for place, var in enumerate(super().__iter__()):
            if place == at:
                raise KeyboardInterrupt
            yield var
        if at == len(self):
            raise KeyboardInterrupt


def make_program(seed, count=14):
    """Return a random program of ``count`` operations: tuples (reads, writes, fails) on five vars."""
    rng = random.Random(seed)
    program = []
    for _ in range(count):
        cells = rng.sample(range(CELLS), rng.randint(1, 4))
        cut = rng.randint(0, len(cells))
        program.append((cells[:cut], cells[cut:], rng.random() < 0.06))
    return program


def state(made):
    """Return the state of each var; operations and failures are represented by name."""
    return [
        (
            var.version,
            var.readers,
            var.write and var.write.name,
            [op.name for op in (var.waiting or ())[var.head :]],
            var.failure and var.failure.label,
        )
        for var in made
    ]


def run(program, when=None, where=None, number=None, at=None, debug=False):
    """Run the program, with one interrupt in the operation ``number``.

    The interrupt comes at ``when`` ("admission" or "completion"), in the loop over ``where`` ("reads" or "writes"),
    before var ``at``. Return the states after each change, the execution order and the number of interrupts.
    """
    sim, seen, interrupts = engine.create("Simulator", choose=lambda ready: len(ready) // 2), [], 0
    variables = [sim.new_variable() for _ in range(CELLS)]
    ops = []

    def fire(change):
        nonlocal interrupts
        try:
            change()
        except KeyboardInterrupt:
            interrupts += 1
        assert sim._region.token
        waits = [(op.name, op.wait, op.seq) for op in ops if op.fn is not None]
        counts = sim.statistics()
        seen.append((state(variables), waits, sorted(op.name for op in sim._dispatched), sorted(sim._region.in_flight)))
        seen.append((counts.pushed, counts.completed, counts.pending, counts.failed, counts.skipped))

    for i, (reads, writes, fails) in enumerate(program):
        read_vars, write_vars = Vars(variables[r] for r in reads), Vars(variables[w] for w in writes)
        target = read_vars if where == "reads" else write_vars

        def work(i=i, fails=fails, target=target):
            if when == "completion" and i == number:
                target.at = at
            if fails:
                raise Boom(i)

        op = OprBlock(work, read_vars, write_vars, str(i))
        ops.append(op)
        if when == "admission" and i == number:
            target.at = at
        sim._region.requests.append(op)
        fire(partial(sim._region.apply, sim))
        if i % 4 == 3:
            fire(sim.step)
    while sim._dispatched:
        fire(sim.step)
    assert sim._region.pending == 0
    with suppress(Boom):
        sim.wait_for_all()
    return seen, sim.history, interrupts


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("when", ["admission", "completion"])
@pytest.mark.parametrize("seed", range(3))
def test_interrupt_at_each_loop_end(monkeypatch, when, seed, debug):
    """An interrupt before or after any var in an operation's loops leaves states, counts and order unchanged."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", debug)
    program = make_program(seed)
    want_seen, want_history, _ = run(program)
    fired = 0
    for number, (reads, writes, _) in enumerate(program):
        for where, cells in (("reads", reads), ("writes", writes)):
            for at in range(len(cells) + 1):
                seen, history, interrupts = run(program, when, where, number, at)
                assert interrupts <= 1
                fired += interrupts
                assert history == want_history, (number, where, at)
                assert seen == want_seen, (number, where, at)
    assert fired > 15


@pytest.mark.parametrize("before", [True, False])
def test_interrupt_around_dispatch(monkeypatch, before):
    """If dispatch is interrupted at its start or end, each operation still runs once, in order."""
    sim = engine.create("Simulator")
    var, ran, dispatch, calls = sim.new_variable(), [], sim._dispatch, []

    def interrupted():
        calls.append(1)
        if len(calls) % 3 != 1:
            return dispatch()
        if not before:
            dispatch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sim, "_dispatch", interrupted)
    interrupts = 0
    for i in range(9):
        try:
            sim.push(lambda i=i: ran.append(i), (), [var])
        except KeyboardInterrupt:
            interrupts += 1
    while sim._region.pending:
        try:
            sim.wait_for_all()
        except KeyboardInterrupt:
            interrupts += 1
    assert ran == list(range(9))
    assert (var.version, var.state) == (9, "IDLE")
    assert interrupts >= 3


@pytest.mark.parametrize("said", [False, True])
def test_interrupt_around_a_short_operation(monkeypatch, said):
    """An interrupt before a short operation runs makes its wait raise KeyboardInterrupt; one after it has no effect."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, start, ran = eng.new_variable(), eng._start_async, []

    def interrupted(op, done, **options):
        if said:
            start(op, done, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(eng, "_start_async", interrupted)
    eng.push_async(lambda done: (ran.append(1), done()), (), [var], prop=FnProperty.ASYNC)
    monkeypatch.undo()
    if said:
        eng.wait_for_var(var)
    else:
        with pytest.raises(KeyboardInterrupt):
            eng.wait_for_var(var)
    assert ran == [1] * said
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert (var.version, eng.statistics().completed, eng.statistics().failed) == (2, 2, 1 - said)
    eng.stop()
