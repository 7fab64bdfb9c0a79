"""Signatures, stubs and documentation of operators, and public names, as editors and type checkers see them."""

from __future__ import annotations

import ast
import doctest
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weftplan as mx
from tests.support.scripts import script
from weftplan.executor import simple_bind
from weftplan.ops.core import registry
from weftplan.ops.core.documented_shapes import INPUT_SHAPES
from weftplan.ops.core.examples import EXAMPLES
from weftplan.ops.core.schema import REQUIRED
from weftplan.ops.core.signatures import document, signature, stub
from weftplan.planner import plan

ROOT = Path(__file__).parents[2]


def test_the_page_of_operators_tells_gradients() -> None:
    """The page of operators says which have a gradient; an existing operator is not listed as missing."""
    result = script("list_operators")
    facts = {name: op for name, (op, _) in result.ours().items()}
    assert result.gradient(facts["Convolution"]) == "yes"
    assert result.gradient(facts["SoftmaxOutput"]) == "a loss"
    assert result.gradient(facts["_contrib_quantize"]) == "-"
    assert "Convolution" not in result.missing()


def test_the_stubs_are_python() -> None:
    """Each stub is valid Python."""
    for text in script("write_stubs").stubs().values():
        ast.parse(text)


def test_every_operator_has_a_signature() -> None:
    """The signature of an operator, of arrays and of symbols, has all its parameters."""
    for name in dir(mx.sym):
        if not registry.contains(name) or not hasattr(getattr(mx.sym, name), "__signature__"):
            continue
        op = registry.get(name)
        for function in (getattr(mx.sym, name), getattr(mx.nd, name)):
            names = inspect.signature(function).parameters
            assert {param.name for param in op.params if param.name != op.variadic} <= set(names), name


def test_a_signature_reads_well() -> None:
    """Signatures have the inputs, required parameters, defaults, legal values and the result's type."""
    actual = inspect.signature(mx.sym.Convolution)
    assert list(actual.parameters)[:5] == ["data", "weight", "bias", "kernel", "stride"]
    assert actual.parameters["kernel"].default is REQUIRED
    assert actual.parameters["num_group"].default == 1
    assert str(actual.return_annotation) == "Symbol"
    assert "Literal['max', 'avg', 'sum', 'lp']" in str(inspect.signature(mx.nd.Pooling))
    assert str(signature(registry.get("clip"), "NDArray", ())) == (
        "(data: NDArray | None = None, a_min: float = REQUIRED, a_max: float = REQUIRED) -> NDArray"
    )
    text = stub("Concat", registry.get("Concat"), "Symbol", ())
    assert text.startswith("def Concat(*data: Symbol | Sequence[Symbol]")


def test_arrays_and_symbols_have_one_documentation() -> None:
    """An operator of arrays has the same docstring as of symbols, with input shapes and legal values."""
    for name in ("Convolution", "Pooling", "clip", "Concat"):
        assert mx.sym.__dict__.get(name, getattr(mx.sym, name)).__doc__ == getattr(mx.nd, name).__doc__
    text = document(registry.get("Pooling"))
    assert "Inputs: data (batch, channels, *spatial)." in text
    assert "pool_type (Literal['max', 'avg', 'sum', 'lp'], default 'max')" in text


NEEDED: dict[str, dict[str, Any]] = {
    "BilinearSampler": {},
    "Convolution": {"kernel": (3, 3), "num_filter": 6, "num_group": 2},
    "Deconvolution": {"kernel": (3, 3), "num_filter": 6, "num_group": 2},
    "Embedding": {"input_dim": 10, "output_dim": 3},
    "FullyConnected": {"num_hidden": 5},
    "LRN": {"nsize": 3},
    "Pooling": {"kernel": (2, 2)},
    "RNN": {"state_size": 5, "num_layers": 2, "mode": "gru", "bidirectional": True},
    "ROIPooling": {"pooled_size": (2, 2), "spatial_scale": 1.0},
    "SpatialTransformer": {"target_shape": (3, 3), "transform_type": "affine", "sampler_type": "bilinear"},
}
"""Parameters of operators with documented input shapes, if the defaults do not suffice."""
DIMENSIONS: dict[str, Any] = {
    "batch": 2, "channels": 4, "spatial": (7, 8), "height": 7, "width": 8, "rows": 3, "columns": 5, "steps": 6,
    "classes": 9, "labels": 4, "places": (2, 3), "inputs": 11, "features": 5, "outputs": (3,), "regions": 4,
    "rest": (3,), "inner": 7, "shape": (2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUT_SHAPES)
def test_the_shapes_of_inputs_are_those_of_inference(name: str) -> None:
    """The documented input shapes agree with shape inference from the first input."""
    op = registry.get(name)
    params = NEEDED.get(name, {})
    known = {**DIMENSIONS, **{param.name: param.default for param in op.params}, **params}
    texts = INPUT_SHAPES[name]
    shapes = {key: eval(text.replace("/", "//"), {}, known) for key, text in texts.items() if text.startswith("(")}
    node = getattr(mx.sym, name)(**{key: mx.sym.Variable(key) for key in texts}, **params)
    names, states = node.list_arguments(), node.list_auxiliary_states()
    inputs = {key: shape for key, shape in shapes.items() if key in names}
    first = next(iter(inputs))
    arguments, _, auxiliary = node.infer_shape_partial(**{first: inputs[first]})
    for key, actual in zip([*names, *states], [*arguments, *auxiliary], strict=True):
        if key in shapes and actual and 0 not in actual:
            assert actual == shapes[key], key
    assert node.infer_shape(**inputs)[1]
    assert f"{first} {texts[first]}" in document(op)


def test_an_elementwise_operator_takes_any_shape() -> None:
    """The documentation of an elementwise operator says that its input may have any shape."""
    assert "Inputs: data of any shape." in document(registry.get("exp"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_operators(name: str) -> None:
    """The example of an operator calls it and prints the documented output."""
    registry.get(name)
    assert name in EXAMPLES[name]
    actual = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, 0)
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(actual)
    assert results.failed == 0
    assert results.attempted >= 3


def test_symbol_method_stubs() -> None:
    """The stubs of Symbol.plan and Symbol.simple_bind have the keywords of their functions."""
    tree = ast.parse((ROOT / "weftplan" / "symbol" / "verbs.pyi").read_text())
    methods = {node.name: node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for verb, function in (("plan", plan), ("simple_bind", simple_bind)):
        names = [arg.arg for arg in (*methods[verb].args, *methods[verb].kwonlyargs)][1:]
        kinds = (inspect.Parameter.VAR_KEYWORD,)
        expected = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds][1:]
        assert names == expected


SCRIPT = """
import weftplan as mx

net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3)
plan = net.plan(data=(2, 4))
reveal_type(plan)
reveal_type(net.simple_bind(mx.cpu(), data=(2, 4)))
kv = mx.kv.create("local")
kv.push("w", mx.nd.ones((2,)))
kv.pull("w", out=mx.nd.ones((2,)))
mx.sym.FullyConected(net)
mx.sym.FullyConnected(net, num_hiden=3)
mx.sym.Pooling(net, pool_type=7)
mx.nd.nonsense
mx.nonsense
print(plan.peek)
net.reshape(shape=(2, 3)).tanh().sum(axis=1)
net.tanhh()
net.sum(axes=1)
mx.nd.ones((2,)).relu().asnumpy()
mx.nd.ones((2,)).rellu()
mx.nd.ones((2,)).sum(axes=1)
mx.sym.linalg.gemm2(net, net, transpose_a=True)
mx.sym.linalg.gemm3(net, net)
mx.nd.linalg.potrf(mx.nd.ones((2, 2)))
mx.sym.contrib.box_nms(net, overlap_tresh=0.5)
mx.sym.random.uniform(low=0, high=1, shape=(2,))
mx.sym.random.unifrom(low=0)
kv.push("w", 3)
kv.pull(2.5, out=mx.nd.ones((2,)))
kv.push(["a", "b"], [[mx.nd.ones((2,))], [mx.nd.ones((2,))]])
mx.nd.contrib.box_nms(mx.nd.ones((2, 6)), overlap_thresh=0.5)
mx.nd.contrib.box_nms(mx.nd.ones((2, 6)), overlap_tresh=0.5)
mx.nd.contrib.box_nsm(mx.nd.ones((2, 6)))
mx.nd.linalg.gemm2(mx.nd.ones((2, 2)), mx.nd.ones((2, 2)), transpose_b=True)
mx.nd.linalg.gemm2(mx.nd.ones((2, 2)), mx.nd.ones((2, 2)), transposed_b=True)
mx.nd.linalg.portf(mx.nd.ones((2, 2)))
mx.nd.random.uniform(low=0, high=1, shape=(2,))
mx.nd.random.uniform(lo=0)
mx.nd.random.unifrom(low=0)
mx.sym.contrib.box_nsm(net)
mx.sym.linalg.gemm2(net, net, transposed_b=True)
mx.sym.random.normal(locc=0)
mx.random.uniform(0, 1, shape=(2,))
mx.random.unifrom(0, 1)
mx.mod.Module(net).fit(mx.io.NDArrayIter([1.0], batch_size=1), num_epoch=1)
mx.mod.Module(net).fit(mx.io.NDArrayIter([1.0], batch_size=1), epochs=1)
mx.mod.Module(net, ctx=mx.cpu())
mx.init.Xavier(magnitud=2)
"""


NESTED = (33, 34, 36, 37, 39, 40, 41, 42, 43, 45, 47, 48, 49)
"""Lines of the script with a mistake in contrib, linalg or random, or in a keyword of fit, Module or an initializer."""


@pytest.mark.stress  # half a minute without a cache of types; CI runs it after mypy
def test_a_type_checker_finds_what_is_misspelt(tmp_path: Path) -> None:
    """mypy --strict infers the types of plans and executors, and reports each misspelt name of a script."""
    pytest.importorskip("mypy")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line.partition("script.py:")[2] for line in done.stdout.splitlines() if "script.py:" in line]
    told: dict[int, str] = {}
    for line in lines:
        told.setdefault(int(line.split(":")[0]), line)
    assert "weftplan.planner.memory_plan.MemoryPlan" in told[6], done.stdout + done.stderr
    assert "weftplan.executor.executor.Executor" in told[7]
    assert sorted(told) == [6, 7, 11, 12, 13, 14, 15, 16, 18, 19, 21, 22, 24, 26, 28, 29, 30, *NESTED], done.stdout
    assert 'Module has no attribute "FullyConected"' in told[11]
    assert 'Unexpected keyword argument "num_hiden"' in told[12]
    assert '"Symbol" has no attribute "tanhh"' in told[18]
    assert 'Unexpected keyword argument "axes"' in told[22]


NAMESPACES = (
    "callback", "context", "engine", "executor", "init", "io", "kv", "lr_scheduler", "metric", "mod", "model", "models",
    "mon", "nd", "optimizer", "planner", "profiler", "random", "recordio", "rnn", "runtime", "storage", "sym", "util",
    "viz",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMESPACES)
def test_dir_shows_public_names(name: str) -> None:
    """``dir`` of a namespace shows existing public names only, without imported helpers."""
    namespace = getattr(mx, name)
    names = dir(namespace)
    assert names
    assert not [n for n in names if n.startswith("_")]
    assert not {"Any", "annotations", "TYPE_CHECKING", "importlib", "did_you_mean", "Callable"} & set(names)
    assert all(hasattr(namespace, n) for n in names)


PACKAGES = ("engine", "executor", "kvstore", "models", "ndarray", "planner", "profiler", "rnn", "storage", "symbol")


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_does_not_depend_on_what_was_imported_first(name: str) -> None:
    """``dir`` of a package shows public names only, even if one of its modules was imported first."""
    package = getattr(mx, name)
    assert package.__dir__.__module__ == package.__name__  # the package defines __dir__ itself
    assert not [n for n in dir(package) if n.startswith("_")]
