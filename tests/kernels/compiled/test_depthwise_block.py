"""A depthwise convolution between two batch norms, fused: the bits of its nodes, by NumPy and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from weftplan.kernels.compiled.depthwise import block as compiled
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.schema import Op, OpContext, TensorSpec
from weftplan.ops.fusion import depthwise_block
from weftplan.ops.fusion import relu as joined
from weftplan.ops.fusion.depthwise_block import BLOCK, BLOCK_GRADIENT

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


def case(**changes: Any) -> dict[str, Any]:
    """Return the settings of a training block on 2 images of 3 channels; ``changes`` override them."""
    usual = {"batch": 2, "channels": 3, "image": (9, 20), "stride": 1, "relu": True, "fixed": (False, False),
             "given": (False, False), "train": True, "dtype": np.float32, "weighs": True, "seed": 0}  # fmt: skip
    return usual | changes


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Return a case of random sizes and parameters."""
    booleans = st.booleans()
    image, stride = (draw(st.integers(1, 37)), draw(st.integers(1, 37))), draw(st.sampled_from((1, 2)))
    assume(max(image) > stride)  # NumPy computes planes of one element
    return case(
        batch=draw(st.integers(1, 4)),
        channels=draw(st.integers(2, 9)),
        image=image,
        stride=stride,
        relu=draw(booleans),
        fixed=(draw(booleans), draw(booleans)),
        given=(draw(booleans), draw(booleans)),
        train=draw(booleans),
        dtype=draw(st.sampled_from((np.float32, np.float64))),
        weighs=draw(booleans),
        seed=draw(st.integers(0, 99)),
    )


def spec(array: Any) -> TensorSpec:
    """Return the planner's spec of an array."""
    return TensorSpec(array.shape, array.dtype)


def params_of(given_case: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the block."""
    norms = [
        registry.parse_params(registry.get("BatchNorm"), {"fix_gamma": fixed, "use_global_stats": known, "eps": 1e-3})
        for fixed, known in zip(given_case["fixed"], given_case["given"], strict=True)
    ]
    channels, stride = given_case["channels"], given_case["stride"]
    layer = registry.parse_params(
        registry.get("Convolution"),
        {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride), "num_filter": channels, "num_group": channels,
         "no_bias": True},
    )  # fmt: skip
    return {"before": norms[0], "layer": layer, "behind": norms[1], "relu": given_case["relu"]}


class Arrays:
    """A block's inputs, and its output buffers."""

    def __init__(self, given_case: dict[str, Any]) -> None:
        rng = np.random.default_rng(given_case["seed"])
        dtype, channels = given_case["dtype"], given_case["channels"]
        image = (given_case["batch"], channels, *given_case["image"])
        grid = (*image[:2], *(-(-side // given_case["stride"]) for side in image[2:]))

        def normal(*shape: int) -> Any:
            return rng.normal(size=shape).astype(dtype)

        def vectors() -> list[Any]:
            return [normal(channels), normal(channels), normal(channels), rng.uniform(0.5, 2, channels).astype(dtype)]

        self.data, self.weight, self.ograd = normal(*image), normal(channels, 1, 3, 3), normal(*grid)
        self.first, self.second = vectors(), vectors()
        self.out, self.inner, self.dgrad = (np.full(shape, 7, dtype) for shape in (grid, grid, image))
        self.wgrad = np.full_like(self.weight, 7) if given_case["weighs"] else None
        self.kept = [np.full(channels, 7, dtype) for _ in range(4)]
        self.vector_grads = [np.full(channels, 7, dtype) for _ in range(4)]

    def forward(self, fixed: tuple[bool, bool]) -> tuple[list[Any], list[Any]]:
        """Return the block's inputs and outputs; a fixed gamma is None."""
        first, second = (
            [None if one else vectors[0], *vectors[1:]]
            for one, vectors in zip(fixed, (self.first, self.second), strict=True)
        )
        return [self.data, *first, self.weight, *second], [self.out, self.inner, *self.kept]

    def backward(self, fixed: tuple[bool, bool]) -> tuple[list[Any], list[Any]]:
        """Return the inputs and outputs of the block's gradient."""
        vectors = [
            [None if one else arguments[0], arguments[1], *kept]
            for one, arguments, kept in zip(
                fixed, (self.first, self.second), (self.kept[:2], self.kept[2:]), strict=True
            )
        ]
        a, b, c, d = self.vector_grads
        inputs = [self.ograd, self.inner, self.data, self.weight, *vectors[0], *vectors[1]]
        return inputs, [self.dgrad, a, b, self.wgrad, c, d]

    def results(self) -> list[bytes]:
        """Return the bytes of every array that was written."""
        written = [self.out, self.inner, *self.kept, *self.first[2:], *self.second[2:], self.dgrad, *self.vector_grads]
        return [(array + 0).tobytes() for array in (*written, *(() if self.wgrad is None else (self.wgrad,)))]


def compute(
    op: Op, mode: str, params: Any, inputs: list[Any], outputs: list[Any], *, train: bool, like: list[Any] | None = None
) -> None:
    """Run an operator by the implementation for ``mode``, in exactly its declared scratch.

    ``like`` gives the inputs' specs if some inputs are None.
    """
    specs = [spec(one) for one in (inputs if like is None else like)]
    result = [spec(one if one is not None else inputs[3]) for one in outputs]
    chosen = implementations.choose(op, params, specs, result, mode).implementation
    assert chosen.name == mode, op.name
    scratch = np.empty(chosen.workspace(params, specs, result), np.uint8)
    with np.errstate(all="ignore"):
        chosen.kernel(OpContext(np, is_train=train, workspace=scratch), params, inputs, outputs)


def as_nodes(given_case: dict[str, Any], mode: str) -> list[bytes]:
    """Return the results of the unfused nodes."""
    of, params, train = Arrays(given_case), params_of(given_case), given_case["train"]
    relu = given_case["relu"]
    between, between_grad, inner_grad = np.empty_like(of.data), np.empty_like(of.data), np.empty_like(of.inner)
    first, second = of.kept[:2], of.kept[2:]
    norm, layer = depthwise_block.norm, registry.get("Convolution")
    compute(norm(True), mode, params["before"], [of.data, *of.first], [between, *first], train=train)
    compute(layer, mode, params["layer"], [between, of.weight], [of.inner], train=train)
    compute(norm(relu), mode, params["behind"], [of.inner, *of.second], [of.out, *second], train=train)
    back = depthwise_block.norm_gradient
    a, b, c, d = of.vector_grads
    beta = [of.second[1]] if relu else []
    inputs = [of.ograd, of.inner, of.second[0], *beta, *second]
    compute(back(relu), mode, params["behind"], inputs, [inner_grad, c, d], train=train)
    gradient = registry.get("_backward_Convolution")
    inputs = [inner_grad, between, of.weight]
    wgrad = np.empty_like(of.weight)
    compute(gradient, mode, params["layer"], inputs, [between_grad, wgrad], train=train)
    if of.wgrad is not None:
        of.wgrad = wgrad
    inputs = [between_grad, of.data, *of.first[:2], *first]
    compute(joined.GRADIENTS["_backward_BatchNorm"], mode, params["before"], inputs, [of.dgrad, a, b], train=train)
    return of.results()


def as_block(given_case: dict[str, Any], mode: str) -> list[bytes]:
    """Return the results of the fused block."""
    of, params, fixed = Arrays(given_case), params_of(given_case), given_case["fixed"]
    train = given_case["train"]
    everything = (False, False)
    inputs, outputs = of.forward(fixed)
    compute(BLOCK, mode, params, inputs, outputs, train=train, like=of.forward(everything)[0])
    inputs, outputs = of.backward(fixed)
    compute(BLOCK_GRADIENT, mode, params, inputs, outputs, train=train, like=of.backward(everything)[0])
    return of.results()


@settings(max_examples=60, deadline=None)
@given(cases())
@example(case(image=(1, 3), batch=1, stride=2))
@example(case(image=(1, 8), relu=False))
@example(case(stride=2, image=(16, 33), fixed=(True, True), weighs=False))
@example(case(given=(True, False), train=True))
@example(case(train=False))
def test_bits_are_those_of_the_nodes(given_case: dict[str, Any]) -> None:
    """The block and its gradient have the bits of the unfused nodes, compiled and by NumPy."""
    for mode in ("numpy", "native"):
        assert as_block(given_case, mode) == as_nodes(given_case, mode), mode


@pytest.mark.parametrize("stride", [1, 2])
def test_parts_change_no_bit(stride: int, always_cut: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of channels, each in its own scratch, give the bits of all channels at once."""
    from weftplan.kernels.compiled.depthwise import tables as depthwise_tables

    given_case = case(channels=7, image=(21, 30), stride=stride)
    monkeypatch.setattr(depthwise_tables, "FEW", 1 << 40)
    depthwise_tables.scratch.cache_clear()
    whole = as_block(given_case, "native")
    monkeypatch.setattr(depthwise_tables, "FEW", 1 << 8)
    depthwise_tables.scratch.cache_clear()
    assert as_block(given_case, "native") == whole
    depthwise_tables.scratch.cache_clear()


@pytest.mark.parametrize("stride", [1, 2])
def test_bits_do_not_depend_on_the_width_of_vectors(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 128, 256 and 512 bits give bit-identical results."""
    assert isinstance(HOST, Target)
    given_case = case(channels=4, image=(13, 29), stride=stride, batch=3)
    results = []
    of_target = compiled.entries
    for bits in (128, 256, 512):
        target = Target(HOST.cpu, HOST.features, bits, HOST.registers, HOST.compiler)
        monkeypatch.setattr(compiled, "entries", lambda dtype, step, target=target: of_target(dtype, step, target))
        results.append(as_block(given_case, "native"))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("other", ["ograd", "inner"])
def test_the_gradient_may_overwrite_what_it_reads(other: str) -> None:
    """With stride 1 the data's gradient may overwrite the incoming gradient or the convolution's output."""
    given_case = case(image=(11, 14))
    params = params_of(given_case)
    for mode in ("numpy", "native"):
        results = []
        for shares in (False, True):
            of = Arrays(given_case)
            compute(BLOCK, mode, params, *of.forward((False, False)), train=True)
            if shares:
                of.dgrad = getattr(of, other)
            compute(BLOCK_GRADIENT, mode, params, *of.backward((False, False)), train=True)
            results.append([array.tobytes() for array in (of.dgrad, of.wgrad, *of.vector_grads)])
        assert results[0] == results[1], mode


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pad": (2, 2)}, "another convolution"),
        ({"kernel": (5, 5), "pad": (2, 2)}, "another convolution"),
        ({"no_bias": False}, "another convolution"),
        ({"dilate": (2, 2), "pad": (2, 2)}, "another convolution"),
    ],
)
def test_other_convolutions_are_refused(changes: dict[str, Any], reason: str) -> None:
    """The compiled kernel refuses unsupported convolutions with a reason; NumPy's is chosen."""
    given_case = case()
    params = params_of(given_case)
    layer = registry.get("Convolution")
    shown = {name: params["layer"][name] for name in ("kernel", "pad", "stride", "num_filter", "num_group", "no_bias")}
    params["layer"] = registry.parse_params(layer, shown | changes)
    of = Arrays(given_case)
    inputs = [spec(one) for one in of.forward((False, False))[0]]
    grid = layer.infer_shape(
        params["layer"], [of.data.shape, None, None][: 2 + (not params["layer"]["no_bias"])], [None]
    )
    result = TensorSpec(grid[1][0], of.data.dtype)  # type: ignore[arg-type]
    outputs = [result, result, *[inputs[1]] * 4]
    choice = implementations.choose(BLOCK, params, inputs, outputs, "native")
    assert choice.implementation.name == "numpy"
    assert reason in choice.reason


def test_a_recomputed_block_leaves_the_moving_statistics_alone() -> None:
    """A recomputed block does not change the moving statistics."""
    given_case = case()
    params = params_of(given_case)
    for mode in ("numpy", "native"):
        of = Arrays(given_case)
        inputs, outputs = of.forward((False, False))
        chosen = implementations.choose(BLOCK, params, list(map(spec, inputs)), list(map(spec, outputs)), mode)
        nbytes = chosen.implementation.workspace(params, list(map(spec, inputs)), list(map(spec, outputs)))
        context = OpContext(np, is_train=True, workspace=np.empty(nbytes, np.uint8), recompute=True)
        before = [array.copy() for array in (*of.first[2:], *of.second[2:])]
        chosen.implementation.kernel(context, params, inputs, outputs)
        for was, now in zip(before, (*of.first[2:], *of.second[2:]), strict=True):
            np.testing.assert_array_equal(was, now)
