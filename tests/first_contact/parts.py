"""The parts of the first contact in order: each part relies on the checks before it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

import weftplan as mx
from tests.first_contact.contact import Contact, Part, Skip
from tests.ops import test_on_devices
from tests.support.pointwise_networks import NETWORKS, groups
from weftplan import device, engine, models, storage
from weftplan.cli.doctor.gpu_libraries import libraries
from weftplan.device.interconnect import way
from weftplan.errors import KVStoreError, OutOfMemoryError
from weftplan.planner import PlanOptions
from weftplan.storage import NaivePool, StatisticsResource

_FAMILIES = (
    "BatchNorm", "LayerNorm", "Pooling", "softmax", "SoftmaxOutput", "Dropout", "CTCLoss", "RNN", "im2col", "Embedding",
    "SequenceMask", "ROIPooling", "FullyConnected", "Convolution", "sgd_mom_update", "adam_update", "add_n", "sum",
    "topk",
)  # fmt: skip
"""One operator of each family of kernels."""


@contextlib.contextmanager
def _settings(**values: str) -> Iterator[None]:
    """Set environment variables inside a ``with`` block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_libraries(contact: Contact) -> None:
    """Load CUDA's libraries (cuDNN and NCCL may be missing), and run a kernel of each family."""
    cupy = device.get(contact.context(0)).xp
    contact.at("loading libraries")
    actual, missing = libraries(cupy, "cuda13")
    for name, text in actual.items():
        contact.note(f"{name} {text}")
    assert not missing, missing
    try:
        mx.kv.create("nccl")
        contact.note("NCCL loaded")
    except KVStoreError as error:
        contact.note(f"NCCL: {error}")
    for name in _FAMILIES:
        contact.at(f"the kernel of {name}")
        _, arrays, params = test_on_devices.BY_OPERATOR[name][0]
        _check_operator(contact, name, arrays, params)


def _check_operator(contact: Contact, name: str, arrays: Any, params: Any) -> None:
    """Compare one case of an operator with the host's values, in float32 if the case has float64."""
    if all(np.asarray(x).dtype == np.float64 for x in arrays):
        arrays = [np.asarray(x, np.float32) for x in arrays]
    test_on_devices.check(device.get(contact.context(0)), name, arrays, params)
    contact.settle()


def check_operators(contact: Contact) -> None:
    """Compare all cases of each operator with the host's values; only the first case on the stand-in."""
    checked = 0
    for name, cases in test_on_devices.BY_OPERATOR.items():
        for _, arrays, params in cases[:1] if contact.small else cases:
            contact.at(f"operator {name}")
            _check_operator(contact, name, arrays, params)
            checked += 1
    contact.note(f"{checked} cases of {len(test_on_devices.BY_OPERATOR)} operators")


def _branch_network() -> Any:
    """Return a classifier of four parallel branches, which two workers can compute at the same time."""
    data, sym = mx.sym.Variable("data"), mx.sym
    ends = []
    for branch in range(4):
        x = data
        for layer in range(3):
            x = sym.Activation(sym.FullyConnected(x, num_hidden=32, name=f"f{branch}{layer}"), act_type="relu")
        ends.append(x)
    return sym.SoftmaxOutput(sym.FullyConnected(sym.add_n(*ends), num_hidden=4, name="last"), name="softmax")


def _trained_weights(contact: Contact, context: Any, steps: int, workers: int) -> dict[str, np.ndarray]:
    """Return the weights of the branch network after ``steps`` SGD steps with momentum, from a fixed seed."""
    with engine.using(engine.create("ThreadedEnginePerDevice", gpu_workers=workers)):
        mx.random.seed(5)
        rng = np.random.default_rng(5)
        data = rng.standard_normal((8 * steps, 16)).astype(np.float32)
        batches = mx.io.NDArrayIter(data, rng.integers(0, 4, 8 * steps).astype(np.float32), 8)
        module = mx.mod.Module(_branch_network(), context=context)
        module.fit(
            batches, num_epoch=1, initializer=mx.init.Xavier(rnd_type="uniform"),
            optimizer_params={"learning_rate": 0.05, "momentum": 0.9},
        )  # fmt: skip
        by_name = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
        del module
    return by_name


def _assert_equal_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Check that the arrays of ``a`` are bitwise equal to those of ``b``."""
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


def check_graphs(contact: Contact) -> None:
    """Compare the weight bits of training with and without CUDA graphs, with two workers."""
    steps = 12 if contact.small else 200
    by_name = {}
    for setting in ("0", "1"):
        contact.at(f"{steps} steps with MXNET_ENABLE_CUDA_GRAPHS={setting}")
        with _settings(MXNET_ENABLE_CUDA_GRAPHS=setting):
            by_name[setting] = _trained_weights(contact, contact.context(0), steps, 2)
    _assert_equal_bits(by_name["0"], by_name["1"])
    contact.note(f"{steps} steps, equal bits")


def _losses(context: Any, name: str, batch: int, steps: int, classes: int, shape: tuple[int, ...]) -> list[float]:
    """Train a built-in network for ``steps`` steps of plain SGD; return the cross-entropy of each step."""
    net, shapes = models.get(name, classes, shape), models.input_shapes(name, batch, shape)
    executor = net.simple_bind(context, grad_req="write", **shapes)
    rng = np.random.default_rng(2)
    for key, array in sorted(executor.arg_dict.items()):
        if key == "softmax_label" or (name == "lstm" and key == "data"):
            value = rng.integers(0, classes, array.shape)
        else:
            value = rng.standard_normal(array.shape) * (1.0 if key in shapes else 0.05) + ("gamma" in key)
        array[:] = value.astype(np.float32)
    wanted = executor.arg_dict["softmax_label"].asnumpy().reshape(-1).astype(int)
    losses = []
    for _ in range(steps):
        out = executor.forward(is_train=True)[0]
        executor.backward()
        rows = out.asnumpy().reshape(-1, out.shape[-1]).astype(np.float64)
        losses.append(float(-np.log(np.maximum(rows[np.arange(len(wanted)), wanted], 1e-30)).mean()))
        for key, grad in executor.grad_dict.items():
            if grad is not None and key not in shapes:
                executor.arg_dict[key] -= 1e-3 * grad
    return losses


def check_fusion(contact: Contact) -> None:
    """Compare the bits of fused elementwise nodes with those of single kernels, in several networks."""
    launches = 0
    for name, (make, small) in NETWORKS.items():
        shape = small if contact.small else (64 * small[0], *small[1:])
        if name == "formulas":  # some of its arrays have a fixed shape
            shape = small
        by_name = {}
        for fusion in (False, True):
            contact.at(f"{name} with fusion={fusion}")
            executor = make().simple_bind(
                contact.context(0), grad_req="write", data=shape, options=PlanOptions(fusion=fusion)
            )
            rng = np.random.default_rng(6)
            for array in (*executor.arg_arrays, *executor.aux_arrays):
                array[:] = rng.uniform(0.1, 1.0, array.shape).astype(np.float32)
            outputs = executor.forward(is_train=True)
            executor.backward([mx.nd.ones(out.shape, ctx=contact.context(0)) for out in outputs])
            arrays = [*outputs, *(grad for grad in executor.grad_arrays if grad is not None)]
            by_name[str(fusion)] = {str(k): array.asnumpy() for k, array in enumerate(arrays)}
            launches += len(groups(executor.planned.graph))
        _assert_equal_bits(by_name["False"], by_name["True"])
    contact.note(f"{launches} fused nodes in {len(NETWORKS)} networks, equal bits")


def check_networks(contact: Contact) -> None:
    """Compare the losses of ResNet-18 and an LSTM with the host's, step by step."""
    large = (("resnet18", 16, 20, 10, (3, 64, 64)), ("lstm", 16, 20, 1000, (35,)))
    small = (("resnet18", 1, 1, 4, (3, 16, 16)), ("lstm", 1, 1, 20, (35,)))
    for name, *sizes in small if contact.small else large:
        contact.at(f"{name} on the host")
        wanted = _losses(mx.cpu(), name, *sizes)
        contact.at(f"{name} on the GPU")
        # The stand-in interprets CUDA C, which is slow; so it uses CuPy's kernels here.
        with _settings(WEFTPLAN_KERNELS="numpy") if contact.small else contextlib.nullcontext():
            actual = _losses(contact.context(0), name, *sizes)
        gap = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(actual, wanted, strict=True))
        contact.note(f"{name}: {wanted[0]:.4f} to {wanted[-1]:.4f}, apart by {gap:.1e}")
        assert gap < 2e-2, (actual, wanted)


def check_convolutions(contact: Contact) -> None:
    """Compare convolutions by cuDNN with products by cuBLAS."""
    shape = (2, 8, 12, 12) if contact.small else (16, 64, 56, 56)
    by_name = {}
    for off in (False, True):
        contact.at(f"Convolution with cudnn_off={off}")
        x = mx.sym.Convolution(
            mx.sym.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=shape[1], cudnn_off=off, name="c"
        )
        executor = x.simple_bind(contact.context(0), grad_req="write", data=shape)
        who = executor.memory_plan.kernels.get("c", "")
        if not off and "cudnn" not in who.split(" (")[0]:
            raise Skip(f"convolutions are not computed by cuDNN: {who}")
        rng = np.random.default_rng(1)
        for array in executor.arg_arrays:
            array[:] = rng.standard_normal(array.shape).astype(np.float32)
        out = executor.forward(is_train=True)[0]
        executor.backward(mx.nd.ones(out.shape, ctx=contact.context(0)))
        by_name[off] = [out.asnumpy(), *(grad.asnumpy() for grad in executor.grad_arrays)]
    for mine, theirs in zip(by_name[False], by_name[True], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


def check_seeds(contact: Contact) -> None:
    """Check that training, Dropout and samplers give the same bits twice from one seed, with several workers."""
    steps = 8 if contact.small else 100
    results = []
    for number in range(2):
        contact.at(f"run {number + 1} of {steps} steps")
        results.append(_trained_weights(contact, contact.context(0), steps, 4))
    _assert_equal_bits(*results)
    contact.at("Dropout and samplers")
    draws = []
    for _ in range(2):
        mx.random.seed(9)
        x = mx.nd.random.normal(shape=(1000,), ctx=contact.context(0))
        draws.append(mx.nd.concat(x, mx.nd.Dropout(x, p=0.5, mode="always"), dim=0).asnumpy())
    np.testing.assert_array_equal(*draws)


def check_memory(contact: Contact) -> None:
    """Check that a bind allocates what its plan says, and that the driver takes little more."""
    context = contact.context(0)
    place = device.get(context)
    shapes = {"data": (8, 256 if contact.small else 4096)}
    warm = mx.nd.dot(mx.nd.ones((8, 8), ctx=context), mx.nd.ones((8, 8), ctx=context))
    warm.wait_to_read()
    resource = StatisticsResource(NaivePool(place))
    with storage.using(resource):
        contact.at("binding")
        free = place.memory_info()[0]
        executor = _branch_network().simple_bind(context, grad_req="write", **shapes)
        plan = executor.memory_plan
        for array in executor.arg_arrays:
            array[:] = 0.1
        for _ in range(3):
            executor.forward(is_train=True)
            executor.backward()
        mx.nd.waitall()
        taken, grown = resource.statistics().peak_requested_bytes, free - place.memory_info()[0]
        contact.note(f"plan {plan.total:,} bytes, arrays {taken:,}, the device gave {grown:,}")
        assert executor.allocated_bytes == plan.peak
        assert taken <= 1.02 * plan.total + (1 << 16)
        rounding = 2 << 20  # the driver allocates whole pages
        blocks = resource.upstream.statistics().system_allocations
        workers = 4 * (32 << 20)  # workspace of cuBLAS for each thread
        assert grown <= resource.upstream.statistics().reserved_bytes + blocks * rounding + workers
        del executor, array
        mx.nd.waitall()


class _Refusing:
    """A device whose ``number``-th allocation fails."""

    def __init__(self, place: Any, number: int) -> None:
        self._place, self.left = place, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def allocate(self, nbytes: int) -> Any:
        """Allocate from the device, or raise OutOfMemoryError at the chosen call."""
        self.left -= 1
        if self.left == 0:
            raise OutOfMemoryError("refused by the first contact")
        return self._place.allocate(nbytes)


def check_out_of_memory(contact: Contact) -> None:
    """Check that a failed allocation gives an error or right values, and that the next run is right."""
    context = contact.context(0)
    place = device.get(context)

    def values() -> np.ndarray:
        executor = _branch_network().simple_bind(context, grad_req="write", data=(8, 16))
        for array in executor.arg_arrays:
            array[:] = 0.1
        executor.forward(is_train=True)
        executor.backward()
        actual: np.ndarray = executor.grad_dict["f00_weight"].asnumpy()
        mx.nd.waitall()
        return actual

    wanted = values()
    refused = 0
    for number in range(1, 13 if contact.small else 41):
        contact.at(f"allocation {number}")
        with storage.using(NaivePool(_Refusing(place, number))):  # type: ignore[arg-type]
            try:
                np.testing.assert_array_equal(values(), wanted)
            except OutOfMemoryError:
                refused += 1
            with contextlib.suppress(OutOfMemoryError):
                mx.nd.waitall()
    np.testing.assert_array_equal(values(), wanted)
    contact.note(f"{refused} runs were refused")


def check_several_cards(contact: Contact) -> None:
    """Check copies between GPUs, sums by each store, and equal bits of two runs of a Module on two GPUs."""
    if contact.count < 2:
        raise Skip("there is one GPU")
    a, b = contact.context(0), contact.context(1)
    contact.at("a copy to another GPU")
    x = np.arange(1 << 20, dtype=np.float32)
    actual = mx.nd.array(x, ctx=a).as_in_context(b).as_in_context(a).asnumpy()
    np.testing.assert_array_equal(actual, x)
    contact.note(f"{a} to {b}: {way(a, b)}")
    sums = {}
    for kind in ("local", "device", "nccl"):
        contact.at(f"a store {kind}")
        try:
            kv = mx.kv.create(kind)
        except KVStoreError as error:
            contact.note(f"{kind}: {error}")
            continue
        kv.init("w", mx.nd.zeros((1000,), ctx=a))
        kv.push("w", [mx.nd.array(x[:1000] * k, ctx=context) for k, context in enumerate((a, b), 1)])
        out = mx.nd.empty((1000,), ctx=b)
        kv.pull("w", out)
        sums[kind] = out.asnumpy()
    for kind, value in sums.items():
        np.testing.assert_array_equal(value, 3 * x[:1000], err_msg=kind)
    contact.at("a Module on two GPUs")
    _assert_equal_bits(*(_trained_weights(contact, [a, b], 8, 2) for _ in range(2)))


def check_overlap(contact: Contact) -> None:
    """Check that copies overlap with kernels: both together take less time than in sequence."""
    if contact.small:
        raise Skip("the stand-in's work takes no time")
    context = contact.context(0)
    place = device.get(context)
    host = device.get(mx.Context("cpu_pinned", 0)).allocate(256 << 20)
    target, x = place.allocate(256 << 20), mx.nd.ones((4096, 4096), ctx=context)
    mx.nd.waitall()
    xp = place.xp
    raw = x.raw()
    out = xp.empty_like(raw)
    compute, copies = place.new_stream(), place.new_stream()
    repeat = 40

    def timed(*works: Any) -> float:
        begin, ends = xp.cuda.Event(), []
        place.synchronize()
        begin.record(compute.handle)
        copies.handle.wait_event(begin)
        for stream, work in works:
            with stream:
                work()
            end = xp.cuda.Event()
            end.record(stream.handle)
            ends.append(end)
        for end in ends:
            end.synchronize()
        return max(float(xp.cuda.get_elapsed_time(begin, end)) for end in ends)

    def multiply() -> None:
        for _ in range(repeat):
            xp.matmul(raw, raw, out=out)

    def copy() -> None:
        place.copy(target, host)

    pair = ((compute, multiply), (copies, copy))
    for one in pair:
        timed(one)
    alone, both = [timed(one) for one in pair], timed(*pair)
    contact.note(f"products {alone[0]:.1f} ms, copy {alone[1]:.1f} ms, both {both:.1f} ms")
    assert both < sum(alone) - 0.5 * min(alone)


PARTS = [
    Part("libraries and a kernel of each family", 75, check_libraries),
    Part("operators beside the host's", 135, check_operators),
    Part("fused elementwise nodes", 30, check_fusion),
    Part("CUDA graphs, two workers", 60, check_graphs),
    Part("ResNet-18 and LSTM beside the host's", 90, check_networks),
    Part("cuDNN beside products", 45, check_convolutions),
    Part("the same seed twice", 30, check_seeds),
    Part("memory beside the plan", 30, check_memory),
    Part("out of memory", 45, check_out_of_memory),
    Part("several cards", 45, check_several_cards),
    Part("overlap of copies and kernels", 15, check_overlap),
]
