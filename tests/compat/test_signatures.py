"""Public signatures against MXNet 1.9.1's (``tests/golden/data/signatures.txt``).

Every function, class and method of MXNet that exists here takes MXNet's parameters by MXNet's names and in MXNet's
order. Further parameters come after them, or by name only.
"""

import fnmatch
import inspect
import pathlib

import numpy as np
import pytest

import weftplan as mx
from weftplan.ops.core import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "data" / "signatures.txt"

EXCEPTIONS = {
    "io.Image*RecordIter*": "`path_imgrec` is required; an empty path fails in MXNet",
    "io.ImageRecord*Int8Iter*": "as `ImageRecordIter`",
}
"""Patterns of paths that differ, with the reason that docs/mxnet-differences.md gives."""


def read():
    """Return {path: parameters} of MXNet's functions, constructors and methods, inherited methods included."""
    found, bases = {}, {}
    for line in GOLDEN.read_text().splitlines():
        path, *words = line.split()
        if words and words[0].startswith("("):
            bases[path] = [base for base in words.pop(0)[1:-1].split(",") if base]
        found[path] = words
    for kind, above in bases.items():
        for base in above:
            for path, words in list(found.items()):
                if path.rpartition(".")[0] == base and path not in bases:
                    found.setdefault(kind + path.removeprefix(base), words)
    return found


MXNET = read()


def resolve(path):
    """Return (the callable that has MXNet's ``path`` here, whether it takes ``self``); (None, False) if there is none.

    Operators are methods of instances only of Symbol.
    """
    owner, value = None, mx
    for part in path.split("."):
        owner = mx.sym.var("x") if value is mx.sym.Symbol else value
        try:
            value = getattr(owner, part)
        except (AttributeError, ImportError, mx.MXNetError):
            return None, False
    plain = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, part, None))
    return (value, plain) if callable(value) and MXNET[path][-1:] != ["**internal"] else (None, False)


def differences(theirs, value, method):
    """Return the obstacles that a call in MXNet's way meets here, in words."""
    if theirs == ["*args", "**kwargs"]:
        return []  # passed on to another function
    mine = list(inspect.signature(value).parameters.values())[int(method) :]
    order = [p.name for p in mine if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p for p in mine if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    any_position = any(p.kind is p.VAR_POSITIONAL for p in mine)
    any_name = any(p.kind is p.VAR_KEYWORD for p in mine)
    operator = {"out=", "name="} <= {*theirs}  # its function has a default for each parameter, required or not
    wrong, place, by_position = [], 0, True
    for word in theirs:
        name = word.strip("*=")
        if word.startswith("**") or name == "_":
            place += not word.startswith("**")
            continue
        if word.startswith("*"):
            by_position = False
            following = [word.strip("=") for word in theirs[theirs.index(word) + 1 :]]
            if name and not any_position and not (order[place:] and order[place:] == following[: len(order) - place]):
                wrong.append(f"no *{name}")
            continue
        if by_position and order[place : place + 1] != [name] and not (any_position and place >= len(order)):
            wrong.append(f"position {place} is {', '.join(order[place : place + 1]) or 'absent'}, not {name}")
            break
        place += by_position
        if name not in named and not any_name:
            wrong.append(f"no {name}")
        elif word.endswith("=") and not operator and name in named and named[name].default is inspect.Parameter.empty:
            wrong.append(f"{name} is required")
    taken = {word.strip("*=") for word in theirs}
    if "_" not in taken:
        wrong += [f"{name} is required" for name, p in named.items() if name not in taken and p.default is p.empty]
    return wrong


def excepted(path):
    """Return the patterns of exceptions that match a path."""
    return [pattern for pattern in EXCEPTIONS if fnmatch.fnmatch(path, pattern)]


def test_every_callable_takes_the_parameters_of_mxnet():
    """Names, order and defaults hold for all callables that exist here. The listed exceptions differ, and no others."""
    wrong, used, count = {}, set(), 0
    for path, theirs in MXNET.items():
        value, method = resolve(path)
        if value is None:
            continue
        count += 1
        found = differences(theirs, value, method)
        if found and excepted(path):
            used.update(excepted(path))
        elif found:
            wrong[path] = found
    assert wrong == {}
    assert used == {*EXCEPTIONS}
    assert count > 2000  # a name that goes astray is not compared


def test_the_comparison_sees_differences():
    """Another order, another name, a missing parameter and a new required one are each reported."""
    theirs = ["data", "axis=", "keepdims="]
    assert differences(theirs, lambda data, axis=0, keepdims=0, more=1: 0, False) == []
    assert differences(theirs, lambda data, keepdims=0, axis=0: 0, False) == ["position 1 is keepdims, not axis"]
    assert differences(theirs, lambda x, axis=0, keepdims=0: 0, False) == ["position 0 is x, not data", "x is required"]
    assert differences(theirs, lambda data, axis=0: 0, False) == ["position 2 is absent, not keepdims"]
    assert differences(theirs, lambda data, axis, keepdims=0: 0, False) == ["axis is required"]
    assert differences(theirs, lambda data, axis=0, keepdims=0, *, more: 0, False) == ["more is required"]
    assert differences(["*", "lr="], lambda momentum=0: 0, False) == ["no lr"]


def test_the_page_lists_the_exceptions():
    """There are at most ten exceptions, and docs/mxnet-differences.md has each with its reason."""
    page = (ROOT / "docs" / "mxnet-differences.md").read_text()
    assert len(EXCEPTIONS) <= 10
    assert [row for row in (f"| `{path}` | {why} |" for path, why in EXCEPTIONS.items()) if row not in page] == []


X = mx.nd.array([[1.0, -2.0, 3.0]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mx.nd.clip(X, 0, 1, None, None, 2), "5 at most: data, a_min, a_max, out, name"),
        (lambda: mx.nd.clip(X, 0, a_min=1), "'a_min' is given twice"),
        (lambda: mx.nd.FullyConnected(X, 3), "order by position is data, weight, bias, num_hidden, no_bias, flatten"),
        (lambda: mx.nd.concat(X, X, 1), "inputs are given by position, parameters by name"),
        (lambda: mx.sym.LeakyReLU(mx.sym.var("x"), "elu"), "order by position is data, gamma, act_type"),
        (lambda: mx.lr_scheduler.CosineScheduler(1, 2, 0, 0, 0, "linear", 1), "takes 6 arguments by position, got 7"),
        (lambda: mx.optimizer.SGD(0.9, True, 0.1), "takes 2 arguments by position, got 3: momentum, lazy_update"),
        (lambda: mx.init.Uniform(1, 2), "takes 1 arguments by position, got 2: scale"),
    ],
)
def test_too_many_arguments_name_the_order(call, text):
    """An argument at a position that MXNet does not have is refused with MXNet's order, never by a bare TypeError."""
    with pytest.raises(mx.MXNetError, match=text):
        call()


def test_calls_follow_the_shown_signatures():
    """The arguments of a call get the names that the operator's signature shows, for every operator."""
    for name in registry.names(aliases=False):
        op = registry.get(name)
        shown = inspect.signature(getattr(mx.nd._internal, name)).parameters.values()
        order = [p.name for p in shown if p.kind is p.POSITIONAL_OR_KEYWORD]
        inputs, named = registry.by_position(op, tuple(order), {}, ("out", "name"))
        assert {**dict(zip(order, inputs, strict=False)), **named} == {one: one for one in order}, name


def test_positions_mean_what_they_mean_in_mxnet():
    """Values by position, derived by hand: optional inputs, ``out``, symbols' names, schedules and rates."""
    out = mx.nd.zeros((1, 3))
    mx.nd.elemwise_add(X, X, out)
    assert out.asnumpy().tolist() == [[2.0, -4.0, 6.0]]
    assert mx.nd.LeakyReLU(X, None, "leaky", 0.5).asnumpy().tolist() == [[1.0, -1.0, 3.0]]
    weight = mx.nd.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    assert mx.nd.FullyConnected(X, weight, None, 2, True).asnumpy().tolist() == [[1.0, 6.0]]
    steps = mx.nd.SequenceMask(mx.nd.ones((2, 1)), mx.nd.array([1]), True, 7)
    assert steps.asnumpy().tolist() == [[1.0], [7.0]]
    data = mx.sym.var("data")
    assert mx.sym.Activation(data, "relu", "first").name == "first"
    conv = mx.sym.Convolution(data, None, None, (3, 3), (2, 2), (), (1, 1), 4, name="conv")
    assert conv.infer_shape(data=(1, 2, 8, 8))[1] == [(1, 4, 4, 4)]
    assert mx.lr_scheduler.CosineScheduler(100, 0.1, 0.01)(50) == pytest.approx(0.055)
    assert mx.lr_scheduler.FactorScheduler(10, 0.5, 1e-8, 1.0, 4, 0.2)(2) == pytest.approx(0.6)
    sgd = mx.optimizer.SGD(0.9)
    assert (sgd.momentum, sgd.lr) == (0.9, 0.01)


def test_parameters_of_an_index_come_before_other_multipliers():
    """``param_dict`` gives the multipliers of a weight; the names' multipliers do not count for it then."""
    rates = type("Rates", (), {"lr_mult": 3.0, "wd_mult": 0.5})()
    sgd = mx.optimizer.SGD(
        learning_rate=0.1, wd=0.2, param_idx2name={0: "a_weight", 1: "b_weight"}, param_dict={0: rates}
    )
    sgd.set_lr_mult({"a_weight": 7.0, "b_weight": 2.0})
    assert [sgd._get_lr(k) for k in (0, 1)] == pytest.approx([0.3, 0.2])
    assert [sgd._get_wd(k) for k in (0, 1)] == pytest.approx([0.1, 0.2])


def test_samples_lie_along_the_axis_n():
    """``layout="TNC"`` cuts batches along the second axis; labels with one axis are cut along it."""
    data = np.arange(12.0, dtype="float32").reshape(2, 3, 2)
    batches = mx.io.NDArrayIter(data, np.arange(3.0), 2, False, "pad", "data", "label", "TNC")
    assert [(one.shape, one.layout) for one in batches.provide_data] == [((2, 2, 2), "TNC")]
    assert batches.provide_label[0].shape == (2,)
    first, second = list(batches)
    assert np.array_equal(first.data[0].asnumpy(), data[:, :2])
    assert np.array_equal(second.data[0].asnumpy(), data[:, [2, 0]])
    assert second.label[0].asnumpy().tolist() == [2.0, 0.0]
