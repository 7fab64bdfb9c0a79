"""Harness for operators on NumPy arrays, without graph, engine or storage, that enforces the kernel contract.

Every call gives the kernel a workspace of exactly the declared bytes and outputs, both filled with garbage, read-only
inputs (except auxiliary states), and None for ignored inputs. A kernel with an illegal read or write, an incomplete
output or too much scratch thus fails in any test.

Tests import it as ``ops_harness`` (see conftest.py). It is long because calls, gradients and checks need each other:

* :func:`run` and :func:`gradients` return forward outputs, and gradients by the operator's rule.
* :func:`check_gradient` compares the rule with central differences in float64.
* :func:`check_contract` checks in-place pairs, unwanted outputs, exact workspace, replay and hidden allocations, of the
  forward and the backward calls.
* :class:`SideBySide` runs the parts of one call at the same time.
"""

from __future__ import annotations

import copy
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftplan.ops.core import registry
from weftplan.ops.core.forms import bind
from weftplan.ops.core.implementations import Implementation, numpy_of, provided
from weftplan.ops.core.node_call import NodeCall, is_replayable
from weftplan.ops.core.params import format_value
from weftplan.ops.core.schema import Op, OpContext, TensorSpec


def spec_of(array: np.ndarray) -> TensorSpec:
    """Return the shape and dtype of an array."""
    return TensorSpec(array.shape, array.dtype)


def infer(op: Op, params: Mapping[str, Any], inputs: Sequence[np.ndarray]) -> list[TensorSpec]:
    """Return the inferred output shapes and dtypes; assert that inference is complete and keeps the inputs."""
    count = op.num_outputs(params)
    in_shapes, out_shapes = op.infer_shape(params, [x.shape for x in inputs], [None] * count)
    in_dtypes, out_dtypes = op.infer_dtype(params, [x.dtype for x in inputs], [None] * count)
    assert list(in_shapes) == [x.shape for x in inputs], f"{op.name}: shape inference changed known inputs"
    assert list(in_dtypes) == [x.dtype for x in inputs], f"{op.name}: dtype inference changed known inputs"
    assert len(out_shapes) == len(out_dtypes) == count
    assert all(s is not None for s in out_shapes), f"{op.name}: output shapes {out_shapes} are not complete"
    assert all(d is not None for d in out_dtypes), f"{op.name}: output dtypes {out_dtypes} are not complete"
    return [TensorSpec(tuple(s), np.dtype(d)) for s, d in zip(out_shapes, out_dtypes, strict=True)]


def infer_shapes(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any], params: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Return the shapes of inputs and outputs after inference by operator ``name``; None means unknown."""
    op = registry.get(name)
    completed = op.infer_shape(registry.parse_params(op, params), list(inputs), list(outputs))
    return list(completed[0]), list(completed[1])


def garbage(spec: TensorSpec) -> np.ndarray:
    """Return an array of values that no kernel produces: NaN for floats, else bytes of 0x5a (bool: 1)."""
    array = np.empty(spec.shape, spec.dtype)
    if spec.dtype.kind == "f":
        array.fill(np.nan)
    elif spec.dtype.kind == "b":
        array.view(np.uint8).fill(1)
    else:
        array.reshape(-1).view(np.uint8).fill(0x5A)
    return array


@dataclass
class Call:
    """One kernel call, with all arguments needed to repeat it."""

    op: Op
    params: Mapping[str, Any]
    inputs: list[np.ndarray]
    out_specs: list[TensorSpec]
    is_train: bool = True
    key: tuple[int, int] = (7, 11)
    recompute: bool = False
    taken: int = 0
    """Workspace bytes used by the last call."""
    hidden: int = 0
    """Peak bytes that the last call allocated outside the planner (only with ``trace``)."""
    declared: int = 0
    """Workspace bytes declared by the operator for this call."""
    outputs: list[np.ndarray | None] = field(default_factory=list)

    def __call__(
        self,
        *,
        alias: tuple[int, int] | None = None,
        wanted: Sequence[bool] | None = None,
        trace: bool = False,
    ) -> list[np.ndarray | None]:
        """Run the kernel and return its outputs.

        Args:
            alias: (i, o) gives output o the memory of a copy of input i.
            wanted: for each output whether to compute it; the others are None.
            trace: measure ``hidden``.
        """
        op = self.op
        ignored = set(op.ignored(self.params))
        aux = set(op.mutated(self.params))
        inputs: list[np.ndarray | None] = []
        for k, array in enumerate(self.inputs):
            if k in ignored:
                inputs.append(None)
            elif k in aux or (alias is not None and alias[0] == k):
                inputs.append(array if k in aux and alias is None else np.array(array, order="C"))
            else:
                view = np.ascontiguousarray(array).reshape(array.shape).view()
                view.flags.writeable = trace  # NumPy's argmax copies read-only arrays
                inputs.append(view)
        outputs: list[np.ndarray | None] = [
            garbage(spec) if wanted is None or wanted[k] else None for k, spec in enumerate(self.out_specs)
        ]
        if alias is not None:
            source, target = alias
            base = np.array(self.inputs[source], order="C")
            if source not in ignored:
                inputs[source] = base
            outputs[target] = base.reshape(-1).view(self.out_specs[target].dtype).reshape(self.out_specs[target].shape)
        in_specs = [spec_of(x) for x in self.inputs]
        size = op.workspace_bytes(self.params, in_specs, self.out_specs)
        workspace = garbage_bytes(size)
        ctx = OpContext(
            np,
            is_train=self.is_train,
            workspace=workspace,
            random_key=self.key,
            recompute=self.recompute,
            output_shapes=() if wanted is None else [spec.shape for spec in self.out_specs],
        )
        with np.errstate(all="ignore"):
            if trace:
                tracemalloc.start()
                try:
                    before = tracemalloc.get_traced_memory()[0]
                    op.forward(ctx, self.params, inputs, outputs)
                    self.hidden = tracemalloc.get_traced_memory()[1] - before
                finally:
                    tracemalloc.stop()
            elif op.has_work(outputs):
                op.forward(ctx, self.params, inputs, outputs)
        self.taken = ctx._offset
        self.declared = size
        self.outputs = outputs
        return outputs


def prepare(
    name: str,
    inputs: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    *,
    is_train: bool = True,
    key: tuple[int, int] = (7, 11),
    recompute: bool = False,
) -> Call:
    """Create a call of operator ``name``; parameters are converted to text and parsed, as from a symbol file."""
    op = registry.get(name)
    text = {k: format_value(v) for k, v in (params or {}).items()}
    if op.variadic and op.variadic not in text:
        text[op.variadic] = str(len(inputs))
    parsed = registry.parse_params(op, text)
    arrays = [np.asarray(x) for x in inputs]
    names = op.input_names(parsed)
    assert len(arrays) == len(names), f"{name} takes {names}, got {len(arrays)} inputs"
    specs = infer(op, parsed, arrays)
    return Call(op, parsed, arrays, specs, is_train, key, recompute)


def run(name: str, inputs: Sequence[Any], params: Mapping[str, Any] | None = None, **how: Any) -> list[np.ndarray]:
    """Return all outputs of operator ``name``, also hidden outputs; ``how`` are the options of :func:`prepare`."""
    outputs = prepare(name, inputs, params, **how)()
    for k, array in enumerate(outputs):
        assert array is not None
        assert array.flags.c_contiguous, f"{name}: output {k}"
    return outputs  # type: ignore[return-value]


class Builder:
    """Interpreter of a gradient rule: it computes every node as soon as the rule requests it."""

    def __init__(self, forward: Call, ograds: Sequence[np.ndarray]) -> None:
        self._forward = forward
        self._ograds = list(ograds)
        self.params: Mapping[str, Any] = forward.params
        self.calls: list[Call] = []

    @property
    def num_inputs(self) -> int:
        return len(self._forward.inputs)

    def input(self, index: int) -> np.ndarray:
        return self._forward.inputs[index]

    def output(self, index: int) -> np.ndarray:
        array = self._forward.outputs[index]
        assert array is not None
        return array

    def ograd(self, index: int = 0) -> np.ndarray:
        return self._ograds[index]

    def node(
        self,
        op: str,
        inputs: Sequence[np.ndarray],
        params: Mapping[str, Any] | None = None,
        *,
        suffix: str = "backward",
    ) -> list[np.ndarray]:
        registered = registry.get(op)
        forward = self._forward
        if params is None:
            assert {p.name for p in registered.params} <= set(self.params), f"{op} declares parameters of its own"
            parsed = self.params
        else:
            parsed = registry.parse_params(registered, {k: format_value(v) for k, v in params.items()})
        names = registered.input_names(parsed)
        assert len(names) == len(inputs), f"{op} takes {names}, got {len(inputs)} inputs"
        if registered.backward_of is not None:
            # An operator derived from another may use the other's gradient.
            derived = forward.op.name.startswith("_np") or "BatchNorm" in forward.op.name
            same = registry.get(registered.backward_of).name == forward.op.name or derived
            assert same, f"{op} is the backward of {registered.backward_of}"
            specs = [spec_of(forward.inputs[k]) for k in registered.gradient_inputs(parsed)]
            assert len(specs) == registered.num_outputs(parsed)
        else:
            specs = infer(registered, parsed, inputs)
        call = Call(registered, parsed, list(inputs), specs, forward.is_train, forward.key)
        self.calls.append(call)
        return call()  # type: ignore[return-value]

    def showing(self, params: Mapping[str, Any]) -> Builder:
        duplicate = copy.copy(self)
        duplicate.params = params
        return duplicate


def differentiate(forward: Call, ograds: Sequence[np.ndarray]) -> tuple[list[np.ndarray], Builder]:
    """Return the gradients of all inputs of a call that has run, and the builder with its backward calls."""
    op = forward.op
    assert op.gradient is not None, f"{op.name} has no gradient"
    builder = Builder(forward, ograds)
    entries = op.gradient(builder)
    assert len(entries) == len(forward.inputs), f"{op.name}: one gradient per input"
    result = []
    for k, entry in enumerate(entries):
        source = forward.inputs[k]
        gradient = np.zeros_like(source) if entry is None else entry
        assert gradient.shape == source.shape, f"{op.name}: gradient {k} has shape {gradient.shape}"
        if entry is not None:
            assert gradient.dtype == source.dtype, f"{op.name}: gradient {k} has dtype {gradient.dtype}"
        result.append(gradient)
    return result, builder


def gradients(
    name: str,
    inputs: Sequence[Any],
    ograds: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[np.ndarray]:
    """Return the gradients of all inputs of operator ``name``, zeros where none flows.

    ``ograds`` are the gradients of the first outputs; those of the others are zero.
    """
    call = prepare(name, inputs, params, **how)
    call()
    full = [np.asarray(g) for g in ograds]
    full += [np.zeros(spec.shape, spec.dtype) for spec in call.out_specs[len(full) :]]
    return differentiate(call, full)[0]


DIRECTIONS = 6
"""Number of random directions along which a gradient is compared."""


def check_gradient(
    name: str,
    inputs: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[int] | None = None,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    is_train: bool = True,
    key: tuple[int, int] = (7, 11),
    objective: Callable[[list[np.ndarray]], tuple[float, list[np.ndarray]]] | None = None,
) -> None:
    """Compare the gradient rule with central differences of ``sum(weights * output)``.

    An input of more than a few elements is moved along random directions of +1 and -1. An error in one element changes
    each of these slopes by the same amount, unless others compensate for it in all of them. If a slope is wrong, each
    element is checked.

    Args:
        inputs: float64 arrays; inputs of other dtypes are held constant.
        wrt: inputs to differentiate (default: every float64 input that is not an auxiliary state).
        objective: replaces the weighted sum: (value, gradient of each output) of the outputs. Loss operators, whose
            gradient ignores the incoming gradient, provide their loss.
    """
    arrays = [np.array(x) for x in inputs]
    rng = np.random.RandomState(5)
    op = registry.get(name)
    aux = set(op.aux)

    def evaluate(call: Call) -> tuple[float, list[np.ndarray]]:
        """Return the objective for the present ``arrays``; the kernel gets copies of the auxiliary states."""
        call.inputs = [x.copy() if k in aux else x for k, x in enumerate(arrays)]
        outputs = call()
        if objective is not None:
            return objective(outputs)
        if not hold:
            visible = op.num_visible_outputs(call.params)
            for k, spec in enumerate(call.out_specs):
                hold.append(rng.uniform(0.5, 1.5, spec.shape) if k < visible else np.zeros(spec.shape))
        value = sum(float((w * y).sum()) for w, y in zip(hold, outputs, strict=True))
        return value, [w.astype(y.dtype) for w, y in zip(hold, outputs, strict=True)]

    hold: list[np.ndarray] = []
    call = prepare(name, arrays, params, is_train=is_train, key=key)
    actual, _ = differentiate(call, evaluate(call)[1])
    if wrt is None:
        wrt = [k for k, x in enumerate(arrays) if x.dtype == np.float64 and k not in aux]
    assert wrt, f"{name}: nothing to differentiate"
    atol = max(atol, 1e-8 / eps * 1e-6)
    for k in wrt:
        assert arrays[k].dtype == np.float64, f"{name}: input {k} must be float64"
        saved = arrays[k].copy()

        def slope(direction: np.ndarray, k: int = k, saved: np.ndarray = saved) -> float:
            """Return the central difference of the objective along a direction."""
            np.add(saved, eps * direction, out=arrays[k])
            above = evaluate(call)[0]
            np.subtract(saved, eps * direction, out=arrays[k])
            below = evaluate(call)[0]
            arrays[k][...] = saved
            return (above - below) / (2 * eps)

        if saved.size > 2 * DIRECTIONS:
            largest = float(np.abs(actual[k]).max())
            ways = rng.choice([-1.0, 1.0], (DIRECTIONS, *saved.shape))
            if all(
                abs(slope(way) - float((actual[k] * way).sum())) <= atol * max(1.0, largest) + rtol * largest
                for way in ways
            ):
                continue
        numeric = np.zeros_like(saved)  # per element, to identify the wrong element
        for position in np.ndindex(saved.shape):
            unit = np.zeros_like(saved)
            unit[position] = 1.0
            numeric[position] = slope(unit)
        scale = max(1.0, float(np.abs(numeric).max(initial=0.0)))
        np.testing.assert_allclose(actual[k], numeric, rtol=rtol, atol=atol * scale, err_msg=f"{name}: input {k}")


def check_inplace(call: Call) -> int:
    """Check that each in-place pair gives the outputs of separate memory; return the number of pairs tried."""
    saved = [x.copy() for x in call.inputs]
    expected = [None if y is None else y.copy() for y in call()]
    tried = 0
    for pair in call.op.inplace_pairs(call.params):
        if pair.input >= len(call.inputs) or pair.output >= len(call.out_specs):
            raise AssertionError(f"{call.op.name}: in-place pair {pair} names what does not exist")
        source, target = spec_of(call.inputs[pair.input]), call.out_specs[pair.output]
        if source.nbytes != target.nbytes:
            continue  # the planner never takes such a pair
        call.inputs = [x.copy() for x in saved]
        actual = call(alias=(pair.input, pair.output))
        for k, (want, got) in enumerate(zip(expected, actual, strict=True)):
            np.testing.assert_array_equal(got, want, err_msg=f"{call.op.name}: {pair}, output {k}")
        tried += 1
    call.inputs = saved
    return tried


MOST_SUBSETS = 64
"""Limit for trying all subsets of outputs; if there are more, this number of random subsets is tried."""


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Return subsets of ``count`` outputs: every proper subset, or with many outputs a choice of them.

    The choice is each single output, all outputs but one, random subsets and no output.
    """
    if 1 << count <= MOST_SUBSETS:
        return list(itertools.product((False, True), repeat=count))[:-1]
    one_off = [tuple((n == k) == kind for n in range(count)) for k in range(count) for kind in (True, False)]
    rng = np.random.RandomState(count)
    others = [tuple(bool(bit) for bit in rng.randint(0, 2, count)) for _ in range(MOST_SUBSETS)]
    return list(dict.fromkeys([*one_off, *others, (False,) * count]))


def implementations_of(call: Call) -> list[Implementation]:
    """Return NumPy's kernel and every other host implementation that accepts the call."""
    kernels = [numpy_of(call.op)]
    alternative = provided().get(call.op.name)
    specs = [spec_of(x) for x in call.inputs]
    while alternative is not None:
        if not alternative.refusal(call.params, specs, call.out_specs):
            kernels.append(alternative)
        alternative = alternative.otherwise
    return kernels


def check_unwanted(call: Call) -> None:
    """Check that any subset of outputs may be unwanted (None): the other outputs and states keep their bits.

    Every implementation and its replay are checked, with the workspace declared for the whole call.
    """
    for implementation in implementations_of(call):
        _check_subsets(call, implementation)


def _check_subsets(call: Call, implementation: Implementation) -> None:
    op, params = call.op, call.params
    ignored, states = set(op.ignored(params)), op.mutated(params)
    specs = [spec_of(x) for x in call.inputs]
    nbytes = implementation.workspace(params, specs, call.out_specs)

    def outcome(wanted: Sequence[bool], *, replayed: bool) -> list[bytes | None] | None:
        """Return the bits of outputs and states; None if the kernel cannot be prepared."""
        inputs = [None if k in ignored else np.array(x, order="C") for k, x in enumerate(call.inputs)]
        outputs = [garbage(spec) if one else None for spec, one in zip(call.out_specs, wanted, strict=True)]
        node = NodeCall(
            op, implementation.kernel, params, np, inputs, outputs, workspace=garbage_bytes(nbytes),
            recompute=call.recompute, output_shapes=[spec.shape for spec in call.out_specs],
        )  # fmt: skip
        run = node.prepared() if replayed else node.bound(is_train=call.is_train, random_key=call.key)
        if run is None:
            return None
        with np.errstate(all="ignore"):
            run()
        return [None if x is None else x.tobytes() for x in (*outputs, *(inputs[k] for k in states))]

    whole = (True,) * len(call.out_specs)
    for replayed in (False, True):
        expected = outcome(whole, replayed=replayed)
        for wanted in () if expected is None else subsets(len(whole)):
            replayed_outcome = outcome(wanted, replayed=replayed)
            assert replayed_outcome is not None
            for k, (mine, theirs) in enumerate(zip(replayed_outcome, expected, strict=True)):
                if k < len(wanted):
                    right = (theirs if wanted[k] else None,)
                else:  # an optimizer step with an unwanted weight leaves its states unchanged
                    stays = np.ascontiguousarray(call.inputs[states[k - len(wanted)]]).tobytes()
                    right = (theirs, *((stays,) if "_update" in op.name else ()))
                assert mine in right, f"{op.name}, {implementation.name}: outputs {wanted}: output or state {k}"


def check_prepared(call: Call) -> bool:
    """Check that a bound kernel gives the same bits on each replay; return False if it cannot be replayed."""
    op = call.op
    if not is_replayable(op.forward, call.params):
        return False
    pristine = [np.array(x, order="C") for x in call.inputs]
    expected = [None if y is None else y.copy() for y in call()]
    call.inputs = pristine
    ignored = set(op.ignored(call.params))
    inputs = [None if k in ignored else x.copy() for k, x in enumerate(pristine)]
    outputs = [garbage(spec) for spec in call.out_specs]
    size = op.workspace_bytes(call.params, [spec_of(x) for x in call.inputs], call.out_specs)
    replay = bind(op.forward, OpContext(np, workspace=garbage_bytes(size)), call.params, inputs, outputs)
    for _ in range(2):
        for k in op.mutated(call.params):
            inputs[k][...] = pristine[k]
        for output in outputs:
            output.reshape(-1).view(np.uint8)[:] = 0xAA
        with np.errstate(all="ignore"):
            replay()
        for mine, theirs in zip(outputs, expected, strict=True):
            assert mine.tobytes() == theirs.tobytes(), f"{op.name}: prepared, it gives something else"
    return True


def garbage_bytes(size: int) -> np.ndarray | None:
    """Return a workspace of ``size`` bytes of 0xFF, or None for size 0."""
    return np.full(size, 0xFF, np.uint8) if size else None


def check_workspace(call: Call) -> None:
    """Check that the kernel uses exactly the declared workspace."""
    call.inputs = [x.copy() for x in call.inputs]
    call()
    assert call.taken == call.declared, f"{call.op.name}: declared {call.declared} bytes, took {call.taken}"


def check_hidden(call: Call, limit: int = 40_000) -> None:
    """Check that the kernel allocates at most ``limit`` bytes of its own; inputs should be much larger."""
    call()  # fills first-use caches, which do not count
    call(trace=True)
    assert call.hidden <= limit, f"{call.op.name}: allocated {call.hidden} bytes outside its workspace"


def check_contract(
    name: str,
    inputs: Sequence[Any],
    params: Mapping[str, Any] | None = None,
    *,
    is_train: bool = True,
    hidden_limit: int | None = None,
) -> int:
    """Check in-place pairs, unwanted outputs, workspace and replay, of a forward call and of its gradient calls.

    ``hidden_limit`` adds :func:`check_hidden`. Return the number of in-place pairs tried.
    """
    forward = prepare(name, inputs, params, is_train=is_train)
    pristine = [x.copy() for x in forward.inputs]
    forward.inputs = [x.copy() for x in pristine]
    forward()
    calls = [forward]
    if forward.op.gradient is not None:
        rng = np.random.RandomState(3)
        ograds = [rng.uniform(-1, 1, s.shape).astype(s.dtype) for s in forward.out_specs]
        calls += differentiate(forward, ograds)[1].calls
    tried = 0
    for call in calls:
        if call is forward:
            call.inputs = [x.copy() for x in pristine]
        tried += check_inplace(call)
        check_unwanted(call)
        check_workspace(call)
        check_prepared(call)
        if hidden_limit is not None:
            check_hidden(call, hidden_limit)
    return tried


class SideBySide:
    """Replacement of ``split_in_rooms`` that runs each part on its own thread; :meth:`meet` is a barrier for all.

    A test calls :meth:`meet` between a part's write and its read of scratch memory. Parts that wrongly share scratch
    memory then read each other's values.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._barrier: threading.Barrier | None = None
        self._mine = threading.local()

    def __call__(self, work: Callable[[int, int], None], parts: int) -> None:
        self.counts.append(parts)
        self._barrier = barrier = threading.Barrier(parts, timeout=60)
        errors: list[BaseException] = []

        def run(number: int) -> None:
            self._mine.waits = True
            try:
                work(number, parts - 1 - number)
                self.meet()  # if a part had no work, the others must not wait for it
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def meet(self) -> None:
        """Wait for the other parts; return immediately in a part's second call and outside of parts."""
        if getattr(self._mine, "waits", False):
            self._mine.waits = False
            assert self._barrier is not None
            self._barrier.wait()
