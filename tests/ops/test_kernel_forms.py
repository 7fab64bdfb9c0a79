"""Kernel forms, the adapters of an author's function to the kernel calling convention: all operators use them."""

import ast
import inspect
import pathlib

import numpy as np
import pytest

import weftplan.ops
from tests.support.together import together
from weftplan.ops.core import registry
from weftplan.ops.core.forms import ArrayKernel, ChosenKernel, ContextKernel, context_kernel, kernel, workspace_kernel
from weftplan.ops.core.node_call import NodeCall, bare_call
from weftplan.ops.core.rules import same_dtype, same_shape
from weftplan.ops.core.schema import Op, OpContext, TensorSpec

ROOT = pathlib.Path(weftplan.ops.__file__).parent
ADAPTORS = {"fusion/depthwise_block.py", "fusion/pointwise.py", "fusion/relu.py", "contrib/sync_batch_norm.py"}
"""Files with functions that call the kernel of any other operator."""
BRANCHES = {"nn/pooling.py"}
"""Files with kernels that take different scratch in each branch."""
FLOAT = np.dtype(np.float32)


def kernel_form(op):
    """Return the kernel form of ``op`` that wraps its author's function; None for another kind of kernel."""
    return op.forward if isinstance(op.forward, (ArrayKernel, ContextKernel)) else None


OPERATORS = [
    op
    for op in map(registry.get, registry.names(aliases=False))
    if kernel_form(op) is not None and not callable(op.inputs) and not callable(op.outputs)
]


@together()
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_a_kernel_has_a_parameter_for_every_array(op):
    """The author's function takes the array module or context, the parameters, and every array; then any scratch."""
    form = kernel_form(op)
    signature = inspect.signature(form.function)
    inputs = ["first", "parameters", *op.inputs, *op.outputs]
    if getattr(form, "scratch", None) is None:
        signature.bind(*inputs)
    else:  # scratch follows them
        signature.bind_partial(*inputs)
    named = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    assert named[0] == ("xp" if isinstance(form, ArrayKernel) else "ctx")


def functions():
    """Yield (file, definition) of every function in the operators' files, except the compilers' files."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("compiled/", "cuda/")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    yield name, node


def test_no_operator_repeats_the_calling_convention():
    """No operator file but the adaptors defines a function of (ctx, params, inputs, outputs): the forms provide it."""
    for name, node in functions():
        names = [arg.arg for arg in node.args.args]
        repeated = names[:1] == ["ctx"] and {"inputs", "outputs"} <= set(names)
        assert name in ADAPTORS or not repeated, f"{name}:{node.lineno}"


def test_scratch_that_no_helper_takes_is_declared_with_its_kernel():
    """A workspace kernel passes its context to a helper.

    A kernel that takes its scratch itself must declare it with ``@kernel(scratch=...)``.
    """
    for name, node in functions():
        if name in BRANCHES or not any(ast.unparse(one) == "workspace_kernel" for one in node.decorator_list):
            continue
        inside = [ast.unparse(one) for one in ast.walk(node) if isinstance(one, (ast.Attribute, ast.Call))]
        helped = any("(ctx" in one or one == "ctx.room" for one in inside)
        assert helped or "ctx.take" not in inside, f"{name}:{node.lineno}: write it with @kernel(scratch=...)"


@kernel(scratch=lambda p, x, out: [(x.shape, x.dtype), ((1,), x.dtype)])
def scaled_cube(xp, p, x, out, square, factor):
    """Write factor · x³ to ``out``, with two arrays of scratch."""
    factor.fill(p["factor"])
    xp.multiply(x, x, out=square)
    xp.multiply(square, x, out=out)
    xp.multiply(out, factor, out=out)


def operator(forward):
    """Return an operator of one input and one output with this kernel."""
    return Op(name="cube", forward=forward, infer_shape=same_shape, infer_dtype=same_dtype)


def test_scratch_is_declared_once():
    """The operator's workspace is its kernel's scratch, and the kernel fits into it."""
    op = operator(scaled_cube)
    x, out = np.arange(20, dtype=FLOAT), np.empty(20, FLOAT)
    specs = [TensorSpec(x.shape, FLOAT)]
    assert op.workspace_bytes({"factor": 2}, specs, specs) == 128 + 64
    context = OpContext(np, workspace=np.empty(192, np.uint8))
    op.forward(context, {"factor": 2}, [x], [out])
    np.testing.assert_array_equal(out, 2 * x**3)
    assert context.room == 0


def test_every_way_to_call_gives_the_same():
    """A prepared, a bound and a bare call write the same bytes, also if repeated."""
    op, params = operator(scaled_cube), {"factor": 3}
    x, out = np.arange(20, dtype=FLOAT), np.empty(20, FLOAT)
    node = NodeCall(op, op.forward, params, np, [x], [out], workspace=np.empty(192, np.uint8))
    specs = [TensorSpec(x.shape, FLOAT)]
    bare = bare_call(op.forward, params, specs, specs, 192)
    for call in (
        node.prepared(),
        node.bound(is_train=True, random_key=(0, 0)),
        lambda: bare(x, out, np.empty(192, np.uint8)),
    ):
        for _ in range(3):
            out.fill(np.nan)
            call()
            np.testing.assert_array_equal(out, 3 * x**3)


def test_nothing_is_called_between_an_executor_and_the_author():
    """A prepared or bound call calls the author's function directly, in either form."""

    @kernel
    def plain(xp, p, x, out):
        xp.copyto(out, x)

    @context_kernel
    def asking(ctx, p, x, out):
        ctx.xp.copyto(out, x)

    x, out = np.ones(3), np.empty(3)
    assert NodeCall(operator(plain), plain, {}, np, [x], [out]).prepared().func is plain.function
    node = NodeCall(operator(asking), asking, {}, np, [x], [out])
    assert node.prepared() is None
    assert node.bound(is_train=False, random_key=(0, 0)).func is asking.function


def test_scratch_without_elements():
    """Arrays without elements need no workspace, and the bare call takes none."""
    empty = np.empty((0,), FLOAT)
    specs = [TensorSpec((0,), FLOAT)]
    only = kernel(scratch=lambda p, x, out: [(x.shape, x.dtype)])(lambda xp, p, x, out, t: xp.copyto(out, t))
    assert operator(only).workspace_bytes({}, specs, specs) == 0
    bare_call(only, {}, specs, specs, 0)(empty, empty.copy())


def test_a_kernel_of_a_workspace_is_prepared():
    """A prepared call of a workspace kernel can be repeated: it takes the same scratch each time."""

    @workspace_kernel
    def doubled(ctx, p, x, out):
        room = ctx.take(x.shape, x.dtype)
        ctx.xp.add(x, x, out=room)
        ctx.xp.copyto(out, room)

    x, out = np.arange(20, dtype=FLOAT), np.empty(20, FLOAT)
    call = NodeCall(operator(doubled), doubled, {}, np, [x], [out], workspace=np.empty(128, np.uint8)).prepared()
    for _ in range(3):
        out.fill(np.nan)
        call()
        np.testing.assert_array_equal(out, 2 * x)


def test_a_chosen_kernel_is_called_in_every_way():
    """The parameters choose the kernel, the kernel's own parameters, and whether the call can be replayed."""

    @kernel
    def scaled(xp, p, x, out):
        xp.multiply(x, p["by"], out=out)

    @context_kernel
    def asking(ctx, p, x, out):
        ctx.xp.add(x, ctx.is_train, out=out)

    either = ChosenKernel(lambda p: (scaled, {"by": p["n"] + 1}) if p["n"] else (asking, p))
    x, out = np.ones(3), np.empty(3)
    specs = [TensorSpec((3,), x.dtype)]
    for n, value in ((2, 3.0), (0, 2.0)):
        node = NodeCall(operator(either), either, {"n": n}, np, [x], [out])
        assert (node.prepared() is None) == (n == 0)
        for call in (node.prepared(), node.bound(is_train=True, random_key=(0, 0))):
            if call is not None:
                out.fill(np.nan)
                call()
                assert out.tolist() == [value] * 3
    out.fill(np.nan)
    bare_call(either, {"n": 4}, specs, specs, 0)(x, out)
    assert out.tolist() == [5.0] * 3


def test_only_what_depends_on_the_run_is_not_replayed():
    """Every operator can be replayed, except those that draw numbers, ask for training, or place unwanted outputs."""
    asking = {
        "BatchNorm",
        "BatchNorm_v1",
        "_contrib_SyncBatchNorm",
        "_npx_batch_norm",
        "IdentityAttachKLSparseReg",
        "UpSampling",
    }
    asking |= {f"_backward_{name}" for name in ("Dropout", "RNN", "UpSampling", "Concat", "rnn_param_concat")}
    operators = [op for op in map(registry.get, registry.names(aliases=False)) if op.single is False]
    kernels = {op.name: op.forward for op in operators if not op.random and not isinstance(op.forward, ChosenKernel)}
    assert {name for name, one in kernels.items() if not getattr(one, "replayable", False)} == asking


def test_the_gradient_of_leaky_relu_is_elementwise():
    """The gradient of LeakyReLU, a choice between elementwise kernels, is elementwise too.

    Otherwise no call of it by name would run inline.
    """
    assert registry.get("_backward_LeakyReLU").forward.elementwise
