"""Random programs compared with a serial oracle: values, deletes, and the failure that each push or wait raises.

A program is a list of steps generated from a seed. Every driver runs it, and a short oracle predicts the result. An
operation runs unless an input has failed, or an output has failed and that failure was not raised. A failure spreads to
all outputs. A wait raises its var's failure; ``wait_for_all`` raises the first unraised failure in push order.
"""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from weftplan import engine
from weftplan.device.context import cpu
from weftplan.engine import FnProperty

DRIVERS = {
    "naive": lambda seed: engine.create("NaiveEngine"),
    "threaded": lambda seed: engine.create("ThreadedEngine", cpu_workers=4),
    "one worker": lambda seed: engine.create("ThreadedEnginePerDevice", cpu_workers=1),
    "three workers": lambda seed: engine.create("ThreadedEnginePerDevice", cpu_workers=3, priority_workers=2),
    "simulator": lambda seed: engine.create("Simulator", seed=seed),
}
PROPS = (FnProperty.NORMAL, FnProperty.CPU_PRIORITIZED, FnProperty.ASYNC, FnProperty.NO_SKIP)
CELLS = 6


class Boom(Exception):
    """The error of a failing operation; its argument is the number of the operation."""


def make_program(seed, steps=60):
    """Return a random program: a list of steps, each a tuple whose first item is its kind.

    The kinds are ("op", reads, writes, fails, prop, priority, context, nested, asynchronous), ("wait", cell), ("all",),
    ("delete", cell) and ("bulk", size).
    """
    rng = random.Random(seed)
    program = []
    for _ in range(steps):
        kind = rng.random()
        if kind < 0.78:
            cells = rng.sample(range(CELLS), rng.randint(0, 4))
            cut = rng.randint(0, len(cells))
            fails = rng.random() < 0.1
            prop = rng.choice(PROPS) if rng.random() < 0.3 else FnProperty.NORMAL
            priority, context = rng.choice((0, 0, 0, 3, -2)), rng.choice((0, 0, 1))
            nested, asynchronous = rng.random() < 0.1, rng.random() < 0.1
            reads = cells[:cut] + (cells[:1] if cut and rng.random() < 0.2 else [])
            program.append(("op", reads, cells[cut:], fails, prop, priority, context, nested, asynchronous))
        elif kind < 0.88:
            program.append(("wait", rng.randrange(CELLS)))
        elif kind < 0.91:
            program.append(("all",))
        elif kind < 0.95:
            program.append(("delete", rng.randrange(CELLS)))
        else:
            program.append(("bulk", rng.choice((0, 0, 2, 5))))
    return program


def new_value(old, read, number):
    """Return the value that operation ``number`` writes to a cell, from its old value and the values read."""
    return (old * 31 + sum(read) * 7 + number) % 1_000_003


class Oracle:
    """Serial execution of a program; a failure is a list [number of the operation, step that raised it or None]."""

    def __init__(self, raises_at_push):
        self.raises_at_push = raises_at_push
        self.values = [0] * CELLS
        self.versions = [0] * CELLS
        self.failed = [None] * CELLS
        self.untold = []
        self.deleted = []
        self.raised = []
        self.nested = []

    def run(self, program):
        """Run all steps and a final wait for all; return the oracle."""
        for number, step in enumerate(program):
            getattr(self, step[0])(number, *step[1:])
        self.all(len(program))
        return self

    def tell(self, number, failure):
        """Record that step ``number`` raises a failure; the step is a wait, or on the naive engine a push."""
        if failure[1] is None:
            failure[1] = number
        if failure in self.untold:
            self.untold.remove(failure)
        self.raised.append((number, failure[0]))

    def op(self, number, reads, writes, fails, prop, priority, context, nested, asynchronous):
        """Execute one operation of the program."""
        blocked = None
        if prop != FnProperty.NO_SKIP:
            blocked = next((self.failed[r] for r in reads if self.failed[r]), None)
            if blocked is None:
                blocked = next((f for w in writes if (f := self.failed[w]) and (f[1] is None or f[1] > number)), None)
        if blocked is None and fails:
            blocked = [number, None]
            self.untold.append(blocked)
        elif blocked is None:
            if nested:
                self.nested.append(number)
            read = [self.values[r] for r in reads]
            for w in writes:
                self.values[w] = new_value(self.values[w], read, number)
        for w in writes:
            self.failed[w] = blocked
            self.versions[w] += 1
        if blocked and self.raises_at_push:
            self.tell(number, blocked)

    def wait(self, number, cell):
        """Model wait_for_var."""
        if self.failed[cell]:
            self.tell(number, self.failed[cell])

    def all(self, number):
        """Model wait_for_all."""
        if self.untold:
            first = self.untold[0][0]
            for failure in self.untold:
                failure[1] = number
            self.untold = []
            self.raised.append((number, first))

    def delete(self, number, cell):
        """Replace the var by a new one, with value and version 0."""
        self.deleted.append((number, self.values[cell]))
        self.values[cell], self.versions[cell], self.failed[cell] = 0, 0, None

    def bulk(self, number, size):
        """Do nothing: bulks change no result."""


class Run:
    """Execution of a program on an engine; its results have the names and the form of the oracle's."""

    def __init__(self, eng, pool):
        self.eng, self.pool = eng, pool
        self.cells = [[0] for _ in range(CELLS)]
        self.vars = [eng.new_variable(f"cell {i}") for i in range(CELLS)]
        self.deleted, self.raised, self.nested = [], [], []

    def run(self, program):
        """Run all steps and a final wait for all; return this object."""
        for number, step in enumerate([*program, ("all",)]):
            try:
                getattr(self, step[0])(number, *step[1:])
            except Boom as error:
                self.raised.append((number, error.args[0]))
        self.eng.set_bulk_size(0)
        self.eng.wait_for_all()
        self.values = [cell[0] for cell in self.cells]
        self.versions = [var.version for var in self.vars]
        return self

    def op(self, number, reads, writes, fails, prop, priority, context, nested, asynchronous):
        """Push one operation, synchronous or asynchronous."""
        eng, sources, targets = self.eng, [self.cells[r] for r in reads], [self.cells[w] for w in writes]

        def body():
            if fails:
                raise Boom(number)
            if nested:
                eng.push(lambda: self.nested.append(number), (), [eng.new_variable()])
            read = [cell[0] for cell in sources]
            for cell in targets:
                cell[0] = new_value(cell[0], read, number)

        def start(on_complete):
            def later():
                try:
                    body()
                except Boom as error:
                    on_complete(error)
                else:
                    on_complete()

            self.pool.submit(later)

        push, fn = (eng.push_async, start) if asynchronous else (eng.push, body)
        const_vars, mutable_vars = [self.vars[r] for r in reads], [self.vars[w] for w in writes]
        push(fn, const_vars, mutable_vars, cpu(context), prop=prop, priority=priority, name=f"operation {number}")

    def wait(self, number, cell):
        """Call wait_for_var."""
        self.eng.wait_for_var(self.vars[cell])

    def all(self, number):
        """Call wait_for_all."""
        self.eng.wait_for_all()

    def delete(self, number, cell):
        """Call delete_variable and create a new var in its place."""
        box = self.cells[cell]
        self.eng.delete_variable(self.vars[cell], lambda: self.deleted.append((number, box[0])))
        self.cells[cell], self.vars[cell] = [0], self.eng.new_variable(f"cell {cell}")

    def bulk(self, number, size):
        """Call set_bulk_size."""
        self.eng.set_bulk_size(size)


def check(driver, seed, steps=60):
    """Run one random program on one driver; check values, versions, deletes, raised failures and nested pushes."""
    program = make_program(seed, steps)
    eng = DRIVERS[driver](seed)
    want = Oracle(driver == "naive").run(program)
    with ThreadPoolExecutor(2) as pool:
        got = Run(eng, pool).run(program)
        eng.stop()
    assert got.raised == want.raised, f"seed {seed}"
    assert got.values == want.values, f"seed {seed}"
    assert got.versions == want.versions, f"seed {seed}"
    assert sorted(got.deleted) == sorted(want.deleted), f"seed {seed}"
    assert sorted(got.nested) == sorted(want.nested), f"seed {seed}"
    assert eng.statistics().pending == 0
    assert all(var.state == "IDLE" for var in got.vars)


@pytest.mark.parametrize("driver", DRIVERS)
def test_random_programs_agree_with_the_oracle(driver):
    """For 25 seeds, values, versions, deletes, raised failures and nested pushes equal the oracle's on each driver."""
    for seed in range(25):
        check(driver, seed)


@pytest.mark.stress
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_thousand_random_programs_agree_with_the_oracle(driver):
    """For 1,000 seeds and programs of 20 to 69 steps, each driver agrees with the oracle."""
    for seed in range(1000):
        check(driver, seed + 1000, 20 + seed % 50)


@pytest.mark.stress
@pytest.mark.parametrize("driver", ["threaded", "three workers"])
def test_random_programs_with_a_tiny_switch_interval(driver):
    """With a thread switch every microsecond, 150 programs agree with the oracle."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(150):
            check(driver, seed + 5000)
    finally:
        sys.setswitchinterval(before)


def test_oracle_detects_missing_skips():
    """If a driver does not skip dependants, its values differ from the oracle's."""
    program = [("op", [], [0], True, FnProperty.NORMAL, 0, 0, False, False)]
    program.append(("op", [0], [1], False, FnProperty.NORMAL, 0, 0, False, False))
    eng = engine.create("Simulator")
    eng._blocking_failure = lambda op: None
    with ThreadPoolExecutor(1) as pool:
        got = Run(eng, pool).run(program)
    assert got.values != Oracle(False).run(program).values


def run_in_all_orders(program_of, limit=5000):
    """Run ``program_of(eng)`` on a new simulator for every order that it can choose.

    Yield (history of the new simulator, which is empty; result of ``program_of``) for each run. Raise AssertionError
    after ``limit`` runs.
    """
    script, count = [], 0
    while count < limit:
        taken, width = [], []

        def choose(ready, taken=taken, width=width, script=script):
            width.append(len(ready))
            taken.append(script[len(taken)] if len(taken) < len(script) else 0)
            return taken[-1]

        eng = engine.create("Simulator", choose=choose)
        yield tuple(eng.history), program_of(eng)
        count += 1
        while taken and taken[-1] + 1 >= width[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        script = [*taken[:-1], taken[-1] + 1]
    raise AssertionError("more orders than expected")


@pytest.mark.parametrize("seed", range(6))
def test_every_order_of_a_small_program(seed):
    """In every order, up to eight steps on six cells give the oracle's values, raised failures and versions."""
    program = [step for step in make_program(seed, 14) if step[0] in ("op", "delete")][:8]
    program = [(*s[:7], s[7], False) if s[0] == "op" else s for s in program]
    want = Oracle(False).run(program)
    results = set()
    with ThreadPoolExecutor(1) as pool:
        for _, got in run_in_all_orders(lambda eng: Run(eng, pool).run(program)):
            assert (got.values, got.raised, got.versions) == (want.values, want.raised, want.versions)
            results.add(tuple(got.eng.history))
    assert results


def test_the_number_of_orders_is_right():
    """``run_in_all_orders`` finds 24 orders of four independent operations and two of a diamond."""

    def independent(eng):
        for _ in range(4):
            eng.push(lambda: None, (), [eng.new_variable()])
        eng.wait_for_all()
        return tuple(eng.history)

    def diamond(eng):
        a, b, c = (eng.new_variable() for _ in range(3))
        eng.push(lambda: None, (), [a])
        eng.push(lambda: None, [a], [b])
        eng.push(lambda: None, [a], [c])
        eng.push(lambda: None, [b, c], [a])
        eng.wait_for_all()
        return tuple(eng.history)

    assert len({history for _, history in run_in_all_orders(independent)}) == 24
    assert {history for _, history in run_in_all_orders(diamond)} == {(1, 2, 3, 4), (1, 3, 2, 4)}


def test_concurrent_programs_agree_with_their_oracles():
    """Four threads run programs on separate cells of one engine; values and raised failures equal the oracles'."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
    wrong = []

    def work(seed):
        program = [s for s in make_program(seed, 80) if s[0] != "all"]
        want = Oracle(False).run(program)
        got = Run(eng, pool)
        for number, step in enumerate(program):
            try:
                getattr(got, step[0])(number, *step[1:])
            except Boom as error:
                got.raised.append((number, error.args[0]))
        eng.set_bulk_size(0)
        for var in got.vars:
            with suppress(Boom):
                eng.wait_for_var(var)
        raised = [x for x in want.raised if x[0] < len(program)]
        if [cell[0] for cell in got.cells] != want.values or got.raised != raised:
            wrong.append(seed)

    with ThreadPoolExecutor(2) as pool:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    with suppress(Boom):
        eng.wait_for_all()
    eng.stop()
