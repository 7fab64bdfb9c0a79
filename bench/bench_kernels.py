"""Question: how fast are compiled convolutions and batch norms compared with NumPy, PyTorch and the machine's sgemm?

Every convolution of four networks runs on one thread: forward, gradient of the data, gradient of the weight. A figure
is the least CPU time of several repetitions. PyTorch runs each network in its own process before ours, with one thread
and plain NCHW arrays, as its oneDNN takes them. Further tables show the batch norm of ResNet-18's layers, the seconds
of compilation with an empty and with a filled cache folder, and the share of scratch in plans.

With --dtype float16 or float64 only convolutions are measured, compiled and with NumPy, without PyTorch. With
--roofline only a roofline picture is drawn, and a table with one row per layer is printed.

    python bench/bench_kernels.py [--torch-python PATH] [--networks lenet resnet18_32] [--repetitions 5] [--layers]
    python bench/bench_kernels.py --roofline docs/images/roofline.svg
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time

import blas_setting
import numpy as np
from roofline import Pass, draw, table

import weftplan as mx
from weftplan import models
from weftplan.device.numpy_device import ALIGNMENT
from weftplan.kernels.compiled.target import host
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.planner import PlanOptions
from weftplan.planner.symbolic.pipeline import size_symbol

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "torch_convolutions.py")
PASSES = ("forward", "data", "weight")


def resnet18(batch, extent, stem):
    """Return the convolutions of ResNet-18 for square images of ``extent`` pixels a side.

    A convolution is a tuple: (count, batch, channels, extent, filters, kernel, stride, pad, groups, whether the data
    has a gradient). ``stem`` is the (kernel, stride, pad) of the first convolution.
    """
    rows = [(1, batch, 3, extent, 64, *stem, 1, False)]
    extent = extent if stem[0] == 3 else extent // 4
    rows.append((4, batch, 64, extent, 64, 3, 1, 1, 1, True))
    for channels in (64, 128, 256):
        filters = 2 * channels
        rows.append((1, batch, channels, extent, filters, 3, 2, 1, 1, True))
        rows.append((1, batch, channels, extent, filters, 1, 2, 0, 1, True))
        extent //= 2
        rows.append((3, batch, filters, extent, filters, 3, 1, 1, 1, True))
    return rows


def mobilenet(batch):
    """Return the convolutions of MobileNet v1 for 224x224 images, alternating depthwise and pointwise."""
    rows = [(1, batch, 3, 224, 32, 3, 2, 1, 1, False)]
    extent, channels = 112, 32
    steps = [(1, 64, 1), (2, 128, 1), (1, 128, 1), (2, 256, 1), (1, 256, 1), (2, 512, 1), (1, 512, 5), (2, 1024, 1)]
    for stride, filters, count in [*steps, (1, 1024, 1)]:
        rows.append((count, batch, channels, extent, channels, 3, stride, 1, channels, True))
        extent //= stride
        rows.append((count, batch, channels, extent, filters, 1, 1, 0, 1, True))
        channels = filters
    return rows


NETWORKS = {
    "lenet": [(1, 64, 1, 28, 20, 5, 1, 0, 1, False), (1, 64, 20, 12, 50, 5, 1, 0, 1, True)],
    "resnet18_32": resnet18(32, 32, (3, 1, 1)),
    "resnet18_224": resnet18(8, 224, (7, 2, 3)),
    "mobilenet_224": mobilenet(4),
}


def output_extent(layer):
    """Return the extent of a convolution's output along one axis."""
    return (layer[3] + 2 * layer[7] - layer[5]) // layer[6] + 1


def flops(layer):
    """Return the multiplications plus additions of one pass of a convolution."""
    _, batch, channels, _, filters, kernel, _, _, groups, _ = layer
    return 2 * batch * filters * output_extent(layer) ** 2 * channels // groups * kernel**2


def name(layer):
    """Return a convolution's label for tables, such as ``64-128 3x3/2 32``: channels, kernel, stride, extent."""
    _, _, channels, extent, filters, kernel, stride, _, groups, _ = layer
    kind = f"depthwise {channels}" if groups > 1 else f"{channels}-{filters}"
    return f"{kind} {kernel}x{kernel}{f'/{stride}' if stride > 1 else ''} {extent}"


def least(calls, repetitions):
    """Return the least CPU seconds of each call. All repetitions of a call run before the next call, as in the peer."""
    best = [math.inf] * len(calls)
    for i, call in enumerate(calls):
        for _ in range(repetitions):
            start = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - start)
    return best


def memory(shape, dtype=np.float32):
    """Return an uninitialized array, aligned as in storage, so that vector loads do not cross cache lines."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes].view(dtype).reshape(shape)


def kernel_call(op_name, params, inputs, outputs, shapes, mode):
    """Return a function without arguments that runs the kernel of an operator, chosen by ``mode``, on these arrays."""
    op = registry.get(op_name)
    specs = [TensorSpec(a.shape, a.dtype) for a in inputs]
    chosen = choose(op, params, specs, shapes, mode).implementation
    scratch = memory((chosen.workspace(params, specs, shapes),), np.uint8)

    def call():
        chosen.kernel(OpContext(np, is_train=True, workspace=scratch), params, inputs, outputs)

    return call


def layer_calls(layer, mode, dtype=np.float32):
    """Return {pass: function that runs it} of a convolution, on random arrays of ``dtype``."""
    _, batch, channels, extent, filters, kernel, stride, pad, groups, has_data = layer
    rng = np.random.default_rng(0)
    of = output_extent(layer)
    shapes = (batch, channels, extent, extent), (filters, channels // groups, kernel, kernel), (batch, filters, of, of)
    x, w, dy = (memory(shape, dtype) for shape in shapes)
    for array in (x, w, dy):
        array[...] = rng.standard_normal(array.shape)
    inputs = {"kernel": (kernel,) * 2, "num_filter": filters, "stride": (stride,) * 2, "pad": (pad,) * 2}
    params = registry.parse_params(registry.get("Convolution"), {**inputs, "num_group": groups, "no_bias": True})
    spec = {id(a): TensorSpec(a.shape, a.dtype) for a in (x, w, dy)}
    calls = {"forward": kernel_call("Convolution", params, [x, w], [memory(dy.shape, dtype)], [spec[id(dy)]], mode)}
    shapes = [spec[id(x)], spec[id(w)]]
    back = "_backward_Convolution"
    if has_data:
        calls["data"] = kernel_call(back, params, [dy, x, w], [memory(x.shape, dtype), None], shapes, mode)
    calls["weight"] = kernel_call(back, params, [dy, x, w], [None, memory(w.shape, dtype)], shapes, mode)
    return calls


def convolutions(networks, repetitions, torch_python, show_layers, dtype):
    """Print the table of convolution times, one row per network, and the mean ratio to PyTorch if it is measured."""
    a = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    out = np.empty_like(a)
    ratios = []
    print(
        "\n| network | GFLOP | sgemm GFLOP/s | NumPy ms | auto ms (GFLOP/s) | torch ms | auto / torch | 3x3 / sgemm |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for network in networks:
        torch = None
        if torch_python:
            command = [torch_python, PEER, json.dumps(NETWORKS[network]), str(repetitions)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
            torch = json.loads(done.stdout.strip().splitlines()[-1])
        total = {"numpy": 0.0, "native": 0.0, "torch": 0.0, "flop": 0.0}
        square = [0.0, 0.0]
        rate = 0.0
        for index, layer in enumerate(NETWORKS[network]):
            calls = {mode: layer_calls(layer, mode, dtype) for mode in ("numpy", "auto")}
            for one in PASSES:
                if one not in calls["auto"]:
                    continue
                both = [calls["numpy"][one], calls["auto"][one], lambda: np.matmul(a, a, out=out)]
                numpy_s, native_s, product_s = least(both, repetitions)
                rate = max(rate, 2 * 1024**3 / product_s)
                torch_s = torch[index][one] if torch else math.nan
                for key, seconds in (("numpy", numpy_s), ("native", native_s), ("torch", torch_s)):
                    total[key] += layer[0] * seconds
                total["flop"] += layer[0] * flops(layer)
                if layer[5] == 3 and layer[8] == 1 and layer[2] > 3:
                    square[0] += layer[0] * flops(layer)
                    square[1] += layer[0] * native_s
                if show_layers:
                    of = f"{native_s * 1e3:.2f} ms ({flops(layer) / native_s / 1e9:.0f} GFLOP/s)"
                    remaining = f"NumPy {numpy_s * 1e3:.2f}, torch {torch_s * 1e3:.2f}"
                    print(f"    {name(layer)} x{layer[0]} {one}: {of}, {remaining}")
        ratios.append(total["native"] / total["torch"])
        share = f"{square[0] / square[1] / rate * 100:.0f} %" if square[1] else "-"
        native = f"{total['native'] * 1e3:.1f} ({total['flop'] / total['native'] / 1e9:.0f})"
        print(
            f"| {network} | {total['flop'] / 1e9:.1f} | {rate / 1e9:.0f} | {total['numpy'] * 1e3:.1f} | {native} | "
            f"{total['torch'] * 1e3:.1f} | {ratios[-1]:.2f} | {share} |",
            flush=True,
        )
    if torch_python:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\nauto / torch, geometric mean of the networks: {mean:.2f} (goal: 0.80, and 1.00 on each)")


def draw_roofline(networks, repetitions, target):
    """Measure every pass, draw the roofline picture into the file ``target``, and print its table."""
    a = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    out, large = np.empty_like(a), np.ones(1 << 24, np.float32)
    copy = np.empty_like(large)
    roofs = [lambda: np.matmul(a, a, out=out), lambda: np.copyto(copy, large)]
    product_s, copy_s = least(roofs, 4 * repetitions)
    passes = []
    for network in networks:
        for layer in NETWORKS[network]:
            _, batch, channels, extent, filters, kernel, _, _, groups, _ = layer
            moved = batch * channels * extent**2 + filters * channels // groups * kernel**2
            moved += batch * filters * output_extent(layer) ** 2
            calls = layer_calls(layer, "auto")
            *seconds, repeated = least([*calls.values(), roofs[0]], repetitions)
            product_s = min(product_s, repeated)
            for kind, spent in zip(calls, seconds, strict=True):
                passes.append(Pass(network, name(layer), kind, flops(layer), 4.0 * moved, spent))
    peak, bandwidth = 2 * 1024**3 / product_s, 2 * large.nbytes / copy_s
    title = f"Convolution passes on one thread ({host().cpu}, {host().name}, float32)"
    with open(target, "w", encoding="utf-8") as file:
        file.write(draw(passes, peak, bandwidth, title))
    print(f"\nroofs: {peak / 1e9:.0f} GFLOP/s (sgemm), {bandwidth / 1e9:.1f} GB/s (copy); drawn into {target}\n")
    print(table(passes, peak, bandwidth))
    shares = sorted(one.share(peak, bandwidth) for one in passes)
    print(f"\nshare of the roof: median {shares[len(shares) // 2]:.0%}, least {shares[0]:.0%}")


def batch_norm(repetitions):
    """Print the milliseconds of ResNet-18's batch norms, forward and backward, with NumPy's and compiled kernels."""
    total = np.zeros((2, 2))
    for count, shape in ((5, (32, 64, 32, 32)), (5, (32, 128, 16, 16)), (5, (32, 256, 8, 8)), (5, (32, 512, 4, 4))):
        rng = np.random.default_rng(0)
        x = rng.standard_normal(shape).astype(np.float32)
        vectors = [np.ones(shape[1], np.float32) for _ in range(4)]
        params = registry.parse_params(registry.get("BatchNorm"), {"fix_gamma": False})
        big, small = TensorSpec(shape, x.dtype), TensorSpec((shape[1],), x.dtype)
        for back, (op, inputs) in enumerate(
            (("BatchNorm", [x, *vectors]), ("_backward_BatchNorm", [x, x, vectors[0], *vectors[2:]]))
        ):
            outputs = [np.empty_like(x), np.empty(shape[1], x.dtype), np.empty(shape[1], x.dtype)]
            calls = [kernel_call(op, params, inputs, outputs, [big, small, small], m) for m in ("numpy", "native")]
            total[back] += count * np.array(least(calls, repetitions))
    (fn, fc), (bn, bc) = total * 1e3
    print(
        f"\nbatch norm of ResNet-18 (32x32, batch 32), ms: forward {fn:.1f} -> {fc:.1f}, backward {bn:.1f} -> {bc:.1f}"
    )


COMPILE = """
import numpy as np, weftplan as mx
from weftplan import models
from weftplan.device.numpy_device import ALIGNMENT
from weftplan.kernels.compiled import jit
symbol = models.get("resnet18", image_shape=(3, 64, 64))
executor = symbol.simple_bind(mx.cpu(), **models.input_shapes("resnet18", 1, (3, 64, 64)))
executor.forward(is_train=True)
executor.backward()
mx.nd.waitall()
print(jit.statistics.compiled, jit.statistics.loaded, jit.statistics.seconds)
"""


def compiling():
    """Print the seconds that a process needs for the kernels of ResNet-18, with an empty and with a filled cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        for what in ("nothing cached", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", COMPILE],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            )
            compiled, loaded, seconds = done.stdout.split()
            print(
                f"kernels of ResNet-18, {what}: {float(seconds):.2f} s ({compiled} modules compiled, {loaded} loaded)"
            )


def is_convolution(node):
    """Return whether the operator of a graph node is, or contains, a convolution or its gradient."""
    return node.op is not None and ("Convolution" in node.op.name or "depthwise" in node.op.name)


def scratch():
    """Print how many bytes the scratch of convolutions adds to plans, and the largest scratch's share of the plan."""
    for network in ("lenet", "resnet18", "mobilenet"):
        for train in (False, True):

            def plan(kernels, *, without=False, network=network, train=train):
                symbol, shapes = models.get(network), models.input_shapes(network, 8)
                request = "write" if train else "null"
                sized = size_symbol(symbol, shapes, grad_req=request, options=PlanOptions(kernels=kernels))
                if without:
                    for nid, node in enumerate(sized.program.graph.nodes):
                        if is_convolution(node):
                            sized.program.workspaces.pop(nid, None)
                return sized.plan().memory

            memory = plan("native")
            numpy_peak, bare = plan("numpy").peak, plan("native", without=True).peak
            most = int(memory.workspace_nbytes.max())
            print(
                f"{network} {'training' if train else 'inference'}: plan {numpy_peak / 1e6:.1f} MB -> "
                f"{memory.peak / 1e6:.1f} MB, largest scratch {most / 1e6:.2f} MB ({most / memory.peak * 100:.1f} %), "
                f"that of convolutions adds {(memory.peak / bare - 1) * 100:.2f} % (goal 2)"
            )


def main():
    """Measure the compiled kernels, and print the tables; ``--roofline`` and ``--dtype`` select a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--torch-python", help="interpreter of an environment with torch")
    parser.add_argument("--layers", action="store_true", help="print every layer")
    parser.add_argument("--dtype", choices=("float16", "float32", "float64"), default="float32", help="of convolutions")
    parser.add_argument("--roofline", metavar="FILE", help="draw every pass under the machine's roofs, as SVG")
    args = parser.parse_args()
    actual = host()
    if isinstance(actual, str):
        raise SystemExit(f"there are no compiled kernels here: {actual}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print(f"kernels compiled for {actual.name} ({actual.cpu}) by {actual.compiler}; one thread, CPU time, least of "
          f"{args.repetitions}")  # fmt: skip
    mx.nd.zeros((1,)).wait_to_read()  # an engine limits BLAS to one thread
    if args.roofline:
        draw_roofline(args.networks, args.repetitions, args.roofline)
        return
    torch_python = args.torch_python if args.dtype == "float32" else None
    convolutions(args.networks, args.repetitions, torch_python, args.layers, args.dtype)
    if args.dtype != "float32":
        return
    batch_norm(args.repetitions)
    compiling()
    scratch()


main()
