"""Random programs of array calls, small and large: methods, operators by name, arithmetic, views, in-place writes.

The expected results are those of the same program on a NaiveEngine that resolves and pushes every call
(``call_settled``). The engines under test may cache calls and run small calls inline. Each of several threads runs a
program and reads shared arrays.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import weftplan as mx
from tests.stress.random_graphs import BROADCAST, PAIRS, UNARY
from weftplan import engine
from weftplan.errors import MXNetError
from weftplan.ndarray import operators
from weftplan.ndarray.calls.invoke import call_settled

SHAPES = ((3, 4), (3, 4), (1, 4), (3, 1), (5,), (2, 3, 4), (1,), (40, 60), (300, 210))
DTYPES = ("float32", "float32", "float32", "float64", "float16", "int32", "uint8", "int64")
METHODS = (
    "sum",
    "mean",
    "max",
    "min",
    "abs",
    "square",
    "exp",
    "transpose",
    "flatten",
    "argmax",
    "clip",
    "reshape",
    "sign",
)
SEPARATE = frozenset({"rsqrt", "gamma", "gammaln", "erfinv"})
"""Operators to omit, because they are slow and take the same code path as other operators."""
Step = tuple[Any, ...]


class Calls:
    """Calls of operators by name; the oracle's calls bypass the call cache."""

    def __init__(self, oracle: bool) -> None:
        self.oracle = oracle

    def by_name(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``nd.<name>``."""
        return call_settled(name, args, kwargs) if self.oracle else operators.function(name)(*args, **kwargs)


def make_program(rng: random.Random, length: int) -> list[Step]:
    """Return a random program: steps with a kind and eight random numbers.

    The numbers, from 0 to 1, choose arrays and parameters when the step runs.
    """
    kinds = (
        "unary pair broadcast method scalar arithmetic inplace view assign reduce join named copy drop busy look bad"
    )
    weights = (5, 4, 3, 4, 4, 4, 3, 2, 2, 3, 2, 4, 1, 3, 1, 4, 1)
    few = [(rng.choices(kinds.split(), weights)[0], *(rng.random() for _ in range(8))) for _ in range(length // 2 + 1)]
    return [rng.choice(few) for _ in range(length)]


def choose(values: Any, draw: float) -> Any:
    """Return the item of ``values`` that ``draw``, a number from 0 to 1, chooses."""
    return values[int(draw * len(values))]


def reduction_of(x: Any, a: float, b: float) -> dict[str, Any]:
    """Return arguments for a reduction of ``x``, chosen by ``a`` and ``b``."""
    axis = choose((None, 0, -1, tuple(range(len(x.shape)))), a)
    return {**({} if axis is None else {"axis": axis}), **({"keepdims": True} if b < 0.4 else {})}


def call_with_parameters(x: Any, others: list[Any], draws: tuple[float, ...]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return (operator, arguments, keyword arguments) of a call with parameters; some arrays are passed by name."""
    a, b, c = draws[:3]
    like = choose([one for one in others if one.shape == x.shape and one.dtype == x.dtype] or [x], b)
    choices: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("softmax", [x], {"axis": choose((-1, 0), b)}),
        ("clip", [x], {"a_min": -0.5, "a_max": choose((0.5, 1, 1.0), b)}),
        ("elemwise_add", [], {"lhs": x, "rhs": like}),
        ("elemwise_sub", [], {"rhs": x, "lhs": like}),
        ("broadcast_mul", [like], {"rhs": x}),
        ("Reshape", [x], {"shape": choose(((-1,), (0, -1), (-1, 1)), b)}),
        ("slice_axis", [x], {"axis": 0, "begin": 0, "end": 1 + int(b * x.shape[0])}),
        ("expand_dims", [x], {"axis": choose((0, -1), b)}),
        ("tile", [x], {"reps": (2,)}),
        ("repeat", [x], {"repeats": 2, "axis": 0}),
        ("one_hot", [x], {"depth": 3}),
        ("Cast", [x], {"dtype": choose(DTYPES, b)}),
        ("dot", [x, like], {"transpose_b": True}),
        ("take", [x, like], {"mode": choose(("clip", "wrap"), b)}),
        ("where", [], {"condition": x, "x": like, "y": x}),
        ("FullyConnected", [x, x], {"num_hidden": x.shape[0], "no_bias": True}),
        ("topk", [x], {"k": 1, "ret_typ": choose(("value", "indices", "both"), b)}),
        ("SliceChannel", [x], {"num_outputs": x.shape[-1], "axis": -1}),
        ("LeakyReLU", [x], {"act_type": choose(("leaky", "elu", "gelu"), b), "slope": choose((0.25, 0.1), c)}),
        ("Activation", [x], {"act_type": choose(("relu", "tanh", "softrelu"), b)}),
        ("norm", [x], {"ord": choose((1, 2), b)}),
        ("smooth_l1", [x], {"scalar": choose((1.0, 2.0), b)}),
        ("add_n", [x, like, x], {}),
        ("_plus_scalar", [x], {"scalar": choose((0.0, -0.0, 1, True), b)}),
    ]
    return choose(choices, a)


def push_slow_write(array: Any, draw: float) -> None:
    """Push a slow write of ``array``, so that the next call finds it pending."""

    def work() -> None:
        total = 0.0
        for k in range(int(draw * 4000)):
            total += k

    engine.get().push(work, (), (array.chunk.var,), array.context, name="a moment")


def step(calls: Calls, pool: list[Any], first: int, what: Step) -> list[Any]:
    """Run one step and return its new arrays; arrays before ``first`` are shared and only read."""
    kind, *draws = what
    a, b, c, d, e = draws[:5]
    x = choose(pool, a)
    y = choose(pool, b)
    own = choose(pool[first:], a)
    verbs: dict[str, Callable[[], Any]] = {
        "unary": lambda: calls.by_name(choose([n for n in UNARY if n not in SEPARATE], b), [x], {}),
        "pair": lambda: calls.by_name(choose(PAIRS, c), [x, choose([o for o in pool if o.shape == x.shape], d)], {}),
        "broadcast": lambda: calls.by_name(f"broadcast_{choose(BROADCAST, c)}", [x, y], {}),
        "named": lambda: calls.by_name(*call_with_parameters(x, pool, (c, d, e))),
        "reduce": lambda: calls.by_name(choose(("sum", "mean", "max", "prod", "nansum"), b), [x],
                                        reduction_of(x, c, d)),
        "join": lambda: calls.by_name("Concat", [x, *[x] * int(c * 3)], {"dim": choose((0, -1), d)}),
        "copy": lambda: x.copy(),
        "scalar": lambda: choose((lambda: x + c, lambda: x * 2, lambda: 1 - x, lambda: x / 3, lambda: x**2,
                              lambda: x > 0, lambda: x == 1, lambda: 2 / x, lambda: -x, lambda: x % 2), d)(),
        "arithmetic": lambda: choose((lambda: x + y, lambda: x * y, lambda: x - y, lambda: x <= y, lambda: y / x), c)(),
    }  # fmt: skip
    if kind == "method":
        name = choose(METHODS, b)
        arguments = {"clip": (-1, 1), "reshape": ((-1,),)}.get(name, ())
        if name == "reshape":  # a view, through which shared arrays must not be written
            return [own.reshape(*arguments)]
        if calls.oracle:
            return [calls.by_name(name, [x], {"a_min": -1, "a_max": 1} if arguments else {})]
        return [getattr(x, name)(*arguments)]
    if kind == "inplace":
        choose(
            (lambda: own.__iadd__(c), lambda: own.__imul__(2), lambda: own.__isub__(y), lambda: own.__imul__(y)), d
        )()
        return []
    if kind == "view":
        part = own[: 1 + int(c * own.shape[0])]
        choose((lambda: part.__imul__(2), lambda: part.__iadd__(d)), e)()
        return [part]
    if kind == "assign":
        own[int(c * own.shape[0])] = choose((1, 0.5, -3), d)
        return []
    if kind == "drop":
        if len(pool) > first + 3:
            pool.pop(first + int(c * (len(pool) - first)))
        return []
    if kind == "busy":
        push_slow_write(own, c)
        return []
    if kind == "look":
        choose((mx.nd.waitall, x.asnumpy, x.wait_to_read), c)()
        return []
    if kind == "bad":
        bad = choose((lambda: calls.by_name("elemwise_add", [x], {}), lambda: calls.by_name("sum", [x], {"axis": 7}),
                  lambda: calls.by_name("Reshape", [x], {"shape": (7, 11, 13)})), c)  # fmt: skip
        bad()
        raise AssertionError("a call was not refused")
    call_results = verbs[kind]()
    return list(call_results) if isinstance(call_results, (list, tuple)) else [call_results]


def run(calls: Calls, shared: list[Any], seed: str, steps: list[Step]) -> list[Any]:
    """Run a program; return the error class of each step that raised, then the values of the remaining arrays."""
    rng = np.random.default_rng(sum(map(ord, seed)))
    drawn = random.Random(seed)
    pool = list(shared)
    for _ in range(6):
        shape = drawn.choice(SHAPES)
        pool.append(mx.nd.array(rng.uniform(-2, 2, shape), dtype=drawn.choice(DTYPES)))
    results: list[Any] = []
    for what in steps:
        try:
            result = step(calls, pool, len(shared), what)
        except MXNetError as error:
            results.append(type(error).__name__)
            continue
        pool += [one for one in result if 0 < one.size <= 200_000]
        while len(pool) > 24:
            pool.pop(len(shared))
    results += [_plain(array) for array in pool]
    return results


def _plain(array: Any) -> Any:
    try:
        values = np.array(array.asnumpy())
    except MXNetError as error:
        return type(error).__name__
    if values.dtype.kind == "f":
        values[np.isnan(values)] = np.nan
    return values.shape, str(values.dtype), values.tobytes()


def trial(seed: str) -> bool:
    """Run programs in one to three threads on a random engine; compare their results with the oracle's."""
    rng = random.Random(seed)
    threads, bulk = rng.choice((1, 1, 3)), rng.choice((0, 0, 0, 5))
    driver = rng.choice(
        ("ThreadedEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "ThreadedEnginePerDevice", "NaiveEngine")
    )
    programs = [make_program(rng, rng.randrange(20, 120)) for _ in range(threads)]
    values = np.random.default_rng(rng.randrange(1 << 30)).uniform(-2, 2, (3, 4)).astype("float32")
    with engine.using(engine.create("NaiveEngine")):
        shared = [mx.nd.array(values), mx.nd.array(values[0])]
        expected = [run(Calls(oracle=True), shared, f"{seed}/{k}", one) for k, one in enumerate(programs)]
    chosen = engine.create(driver, **({} if driver == "NaiveEngine" else {"cpu_workers": 3}))
    outcomes: list[Any] = [None] * threads
    failures: list[BaseException] = []

    def work(number: int, shared: list[Any]) -> None:
        try:
            with engine.bulk(0 if number else bulk):
                outcomes[number] = run(Calls(oracle=False), shared, f"{seed}/{number}", programs[number])
        except BaseException as error:
            failures.append(error)

    with engine.using(chosen):
        shared = [mx.nd.array(values), mx.nd.array(values[0])]
        running = [threading.Thread(target=work, args=(number, shared)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        del shared
    chosen.stop()
    if failures:
        raise failures[0]
    for number, (one, second) in enumerate(zip(expected, outcomes, strict=True)):
        assert len(one) == len(second), f"thread {number} of {driver}: {len(one)} and {len(second)} values"
        different = [k for k, (a, b) in enumerate(zip(one, second, strict=True)) if a != b]
        assert not different, f"thread {number} of {threads} on {driver}: values {different[:6]} of {len(one)} differ"
    return True
