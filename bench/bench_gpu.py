"""Question: does weftplan compute correct results on this GPU, and how fast is it compared with torch?

One command runs all parts in at most eight minutes. Each part runs in its own process with a share of the remaining
time. A part that uses up its share stops early and reports that; a part that hangs is killed. A part that fails, or
leaves a CUDA error that no later call survives, loses only its own remaining rows. The JSON file is rewritten after
every part.

    python bench/bench_gpu.py [--json FILE] [--only PART ...] [--seconds 480]
    python bench/bench_gpu.py --standin

* *correctness*: compares every operator, forward and backward, with the host, on the cases of the tests.
* *launches*: counts kernel launches per node of a training step, host waits, and memory that CuPy allocates outside the
  plan. These counts are a property of the code, and CUDA has no query for them, so they come from the tests' stand-in
  for CuPy.
* *training*: times a step (forward, backward and SGD) of MLP, LeNet, ResNet-18, ResNet-50 and an LSTM. If torch is
  installed, it walks the same graph node by node, eagerly, in the same process and with the same weights.
* *copies*: times the n-way sum relative to a copy on the card, and copies from and to the host.
* *graphs*: runs a step with and without CUDA graphs, and compares the bits and the time.
* *spill*: runs a step of ResNet-18 under a budget of half its memory.
* *allocations*: times an allocation and its free, and counts the bytes that training steps take from the driver.

With ``--standin`` everything runs on the stand-in, on a machine without a GPU: counts and comparisons are real, and
figures that need a card's clock are marked "not measured". All parts are in one file because they share their tables
and because the owner of a card then runs a single command; the networks are in ``gpu_networks.py``.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops")]

import numpy as np  # noqa: E402
from gpu_networks import Twin, bound, fill, step_of  # noqa: E402

import weftplan as mx  # noqa: E402
from weftplan import device, models, planner  # noqa: E402
from weftplan.errors import BudgetError  # noqa: E402

NOT = "not measured (stand-in)"
SHARES = {"launches": 0.15, "copies": 0.08, "allocations": 0.05, "graphs": 0.1, "spill": 0.07, "training": 0.25,
          "correctness": 0.3}  # fmt: skip
"""The parts in their order, and each part's share of the time. Time that a part does not use goes to later parts."""
START = 15.0
"""Seconds that a part may take beyond its share: to start its process and to finish its current step."""


class Clock:
    """The time limit of a part."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.cut = False

    def over(self):
        """Return whether the time is used up, and set ``cut`` if it is."""
        if time.monotonic() > self.end:
            self.cut = True
        return self.cut


def per_call(call, wait, clock, *, rounds=7, least=0.02):
    """Return the median seconds of a call over ``rounds`` batches; ``wait`` waits for the device after each batch.

    A batch makes as many calls as take at least ``least`` seconds. If the clock runs out, fewer batches are made.
    """
    call()
    wait()
    count, actual = 1, []
    while len(actual) < rounds and not (actual and clock.over()):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        spent = time.perf_counter() - start
        if spent < least and not clock.over():
            count *= 2
            continue
        actual.append(spent / count)
    return statistics.median(actual)


# -- correctness ------------------------------------------------------------------------------------------------------


def correctness(args, context, clock, rows):
    """Run the part ``correctness``: count the operators whose values equal those of the host, and report the others."""
    cases = _operator_cases()
    where = device.get(context(0))
    right, names = 0, list(cases.BY_OPERATOR)
    if args.standin:
        names = names[:: args.every]
    tried = 0
    for name in names:
        if clock.over():
            break
        tried += 1
        try:
            cases.test_as_on_the_host(where, name)
            right += 1
        except Exception as error:  # any error means that the operator is wrong
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            rows.append({"what": f"operator {name}", "value": text, "goal": "as on the host", "met": False})
    rows.append({"what": f"operators as on the host, of {tried} that were tried", "value": right, "goal": tried,
                 "met": right == tried})  # fmt: skip
    rows.append({"what": "operators that were tried", "value": f"{tried} of {len(names)}", "goal": None, "met": None})


def _operator_cases():
    for name, file in (("ops_conftest", "conftest.py"), ("ops_on_devices", "test_on_devices.py")):
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "ops" / file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


# -- launches ---------------------------------------------------------------------------------------------------------

NETWORKS = {"resnet50": 32, "vgg16": 16, "densenet121": 16, "lstm": 32}


def launches(args, context, clock, rows):
    """Run the part ``launches`` on the stand-in, even if there is a GPU."""
    for name, batch in NETWORKS.items():
        if clock.over():
            break
        rows.extend(count_launches(name, batch, context))


def count_launches(name, batch, context):
    """Return the rows of one network's training step: launches per node and of the worst operator, waits, bytes."""
    from tests.support.gpu_counts import counted

    actual = counted(models.get(name), models.input_shapes(name, batch=batch), context(0))
    return [
        {"what": f"{name}, batch {batch}: launches per node ({actual.total} on {actual.nodes} nodes)",
         "value": round(actual.mean, 2), "goal": 8, "met": actual.mean <= 8},
        {"what": f"{name}: most in one operator ({actual.worst})", "value": actual.most, "goal": 40,
         "met": actual.most <= 40},
        {"what": f"{name}: host waits inside a step", "value": actual.waits, "goal": 1, "met": actual.waits <= 1},
        {"what": f"{name}: bytes CuPy takes beside the plan", "value": actual.beside, "goal": 0,
         "met": not actual.beside},
        {"what": f"{name}: sums by atomics", "value": actual.atomics, "goal": 0, "met": not actual.atomics},
    ]  # fmt: skip


TRAINED = {"mlp": (64, 10), "lenet": (64, 10), "resnet18": (32, 1000), "resnet50": (32, 1000), "lstm": (32, 10_000)}
SMALL = {"mlp": (8, 10), "lenet": (2, 10), "resnet": (4, 10)}
"""The networks that the stand-in trains instead of ``TRAINED``, with batch size and number of classes."""


def training(args, context, clock, rows):
    """Run the part ``training``: compare outputs with torch's, and time a step of both."""
    torch = _torch(args)
    for name, (batch, classes) in (SMALL if args.standin else TRAINED).items():
        if clock.over():
            break
        executor, inputs = bound(name, batch, context(0))
        fill(executor, inputs, classes, name == "lstm")
        twin = None if torch is None else Twin(torch, models.get(name), executor, inputs, args)
        goal = 1.1 if name == "resnet50" else 1.0
        if twin is not None:
            executor.forward(is_train=True)
            apart = float(np.abs(executor.outputs[0].asnumpy() - twin.outputs()).max())
            rows.append({"what": f"{name}: largest difference of outputs from torch", "value": float(f"{apart:.2g}"),
                         "goal": 2e-2, "met": apart <= 2e-2})  # fmt: skip
        step = step_of(executor, inputs)
        if args.standin:
            step()
            mx.nd.waitall()
            if twin is not None:
                twin.step()
            rows.append({"what": f"{name}, batch {batch}: step", "value": NOT, "goal": goal, "met": None})
            continue
        ours = per_call(step, mx.nd.waitall, clock)
        theirs = None if twin is None else per_call(twin.step, torch.cuda.synchronize, clock)
        rows.append({"what": f"{name}, batch {batch}: step, ms", "value": round(1e3 * ours, 3), "goal": None,
                     "met": None})  # fmt: skip
        if theirs is not None:
            rows.append({"what": f"{name}: of torch eager's {1e3 * theirs:.3f} ms", "value": round(ours / theirs, 3),
                         "goal": goal, "met": ours <= goal * theirs})  # fmt: skip
        del executor, step, twin
    if torch is None:
        rows.append({"what": "torch eager", "value": "not measured: torch cannot be imported", "goal": None,
                     "met": None})  # fmt: skip


def _torch(args):
    """Return torch if it is installed and has a GPU, else None; with the stand-in, torch on the CPU is enough."""
    try:
        import torch
    except ImportError:
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # weftplan uses no TF32
    return torch if args.standin or torch.cuda.is_available() else None


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(args, context, clock, rows):
    """Run the part ``copies``: time the n-way sum relative to a copy on the card, and copies from and to the host."""
    from weftplan.kvstore.gpu_sum import sum_in_single_launch

    where = device.get(context(0))
    nbytes = 1 << (20 if args.standin else 28)
    n = 8
    raws = [where.allocate(nbytes) for _ in range(n + 1)]
    arrays = [raw.view(np.float32) for raw in raws]
    stream = where.new_stream()
    if args.standin:
        from tests.standin_cupy import meter

        with stream:
            for array in arrays:
                where.launch(lambda array=array: array.fill(1))
            meter.reset()
            where.launch(lambda: sum_in_single_launch(arrays[:n], arrays[n]))
            count = meter.total
            stream.synchronize()
        right = bool((copy_to_host(where, arrays[n]) == n).all())
        rows.append({"what": "n-way sum, n = 8: launches", "value": count, "goal": 1, "met": count == 1 and right})
        for what, goal in (("n-way sum, n = 8: of copy bandwidth", 0.92), ("copy out, GB/s", None),
                           ("copy in, GB/s", None)):  # fmt: skip
            rows.append({"what": what, "value": NOT, "goal": goal, "met": None})
        return
    host = device.get(mx.cpu_pinned()).allocate(nbytes)
    with stream:
        plain = 2 * nbytes / per_call(lambda: where.copy(raws[1], raws[0]), stream.synchronize, clock)
        kernel = lambda: where.launch(lambda: sum_in_single_launch(arrays[:n], arrays[n]))  # noqa: E731
        total = (n + 1) * nbytes / per_call(kernel, stream.synchronize, clock)
        out = nbytes / per_call(lambda: where.copy(host, raws[0]), stream.synchronize, clock)
        back = nbytes / per_call(lambda: where.copy(raws[0], host), stream.synchronize, clock)
    rows.append({"what": "copy on the card, GB/s read and written", "value": round(plain / 1e9), "goal": None,
                 "met": None})  # fmt: skip
    rows.append({"what": "n-way sum, n = 8, 256 MB: of copy bandwidth", "value": round(total / plain, 3), "goal": 0.92,
                 "met": total >= 0.92 * plain})  # fmt: skip
    for way, actual in (("out", out), ("in", back)):
        rows.append({"what": f"copy {way}, GB/s", "value": round(actual / 1e9, 1), "goal": None, "met": None})


def copy_to_host(where, array):
    """Return a copy of a device's array in host memory."""
    out = np.empty(array.shape, array.dtype)
    where.copy(out, array)
    return out


# -- graphs -----------------------------------------------------------------------------------------------------------


def graphs(args, context, clock, rows):
    """Run the part ``graphs``: compare training steps with and without CUDA graphs, and count captured segments."""
    for name, batch in (("mlp", 64),) if args.standin else (("mlp", 64), ("lstm", 32), ("resnet18", 32)):
        if clock.over():
            break
        times, bits, states = [], [], []
        for setting in ("0", "1"):
            with environment(MXNET_ENABLE_CUDA_GRAPHS=setting):
                executor, inputs = bound(name, batch, context(0))
            fill(executor, inputs, 10, name == "lstm")
            step = step_of(executor, inputs)
            for _ in range(4):
                step()
            bits.append({n: a.asnumpy().tobytes() for n, a in executor.arg_dict.items()})
            states = executor.cuda_graphs()
            if not args.standin:
                times.append(per_call(step, mx.nd.waitall, clock))
            del executor, step
        same, captured = bits[0] == bits[1], sum(state == "captured" for *_, state in states)
        rows.append({"what": f"{name}: bits with graphs and without", "value": "equal" if same else "differ",
                     "goal": "equal", "met": same})  # fmt: skip
        rows.append({"what": f"{name}: segments captured", "value": f"{captured} of {len(states)}", "goal": None,
                     "met": None})  # fmt: skip
        for reason in sorted({state for *_, state in states} - {"captured"}):
            rows.append({"what": f"{name}: not captured", "value": reason, "goal": None, "met": None})
        ratio = NOT if args.standin else round(times[1] / times[0], 3)
        rows.append({"what": f"{name}: step with graphs / without", "value": ratio, "goal": None, "met": None})


@contextlib.contextmanager
def environment(**values):
    """Set environment variables for the ``with`` block, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


# -- spill ------------------------------------------------------------------------------------------------------------


def spill(args, context, clock, rows):
    """Run the part ``spill``: compare bytes, gradients and time of a step planned with half its memory and with all."""
    name, batch = ("chain", 256) if args.standin else ("resnet18", 64)
    times, gradients, whole = [], [], None
    for part in (1.0, 0.5):
        options = planner.PlanOptions(budget=None if whole is None else int(part * whole))
        try:
            executor, inputs = bound(name, batch, context(0), options=options)
        except BudgetError as error:
            what = f"{name}: a plan with {part} of the memory"
            rows.append({"what": what, "value": str(error)[:160], "goal": "a plan",
                         "met": False})  # fmt: skip
            return
        plan = executor.memory_plan
        whole = whole or plan.peak
        fill(executor, inputs, 10, False)
        executor.forward(is_train=True)
        executor.backward()
        gradients.append([None if g is None else g.asnumpy() for g in executor.grad_arrays])
        on_device = plan.peak - plan.offloaded
        rows.append({"what": f"{name}: planned bytes on the GPU, of all that it needs",
                     "value": round(on_device / whole, 3), "goal": part, "met": on_device <= part * whole})  # fmt: skip
        met = executor.allocated_bytes == plan.peak
        rows.append({"what": f"{name}: bytes planned and allocated", "value": "equal" if met else "differ",
                     "goal": "equal", "met": met})  # fmt: skip
        if not args.standin:
            times.append(per_call(step_of(executor, inputs), mx.nd.waitall, clock))
        del executor
    same = all(a is None or np.array_equal(a, b) for a, b in zip(*gradients, strict=True))
    rows.append({"what": f"{name}: gradients with half the memory", "value": "equal" if same else "differ",
                 "goal": "equal", "met": same})  # fmt: skip
    ratio = NOT if args.standin else round(times[1] / times[0], 2)
    rows.append({"what": f"{name}: step with half the memory / with all", "value": ratio, "goal": None, "met": None})


# -- allocations ------------------------------------------------------------------------------------------------------


def allocations(args, context, clock, rows):
    """Run the part ``allocations``: count bytes that steps take from the driver, and time allocation and free."""
    from weftplan import storage

    resource, where = storage.get(context(0)), device.get(context(0))
    executor, inputs = bound("lenet", 4, context(0))
    step = step_of(executor, inputs)
    for _ in range(2):
        step()
        mx.nd.waitall()
    before = resource.statistics()
    for _ in range(3):
        step()
    mx.nd.waitall()
    after = resource.statistics()
    grown = after.reserved_bytes - before.reserved_bytes
    rows.append({"what": "bytes taken from the driver in three steps", "value": grown, "goal": 0, "met": grown == 0})
    for what, call in (
        ("a pair of allocate and free of 1 MiB, µs", lambda: resource.free(resource.allocate(1 << 20))),
        ("the same of the driver, µs", lambda: where.free(where.allocate(1 << 20))),
    ):
        value = NOT if args.standin else round(1e6 * per_call(call, mx.nd.waitall, clock), 2)
        rows.append({"what": what, "value": value, "goal": None, "met": None})


# -- all --------------------------------------------------------------------------------------------------------------

PARTS = {name: globals()[name] for name in SHARES}


def machine(args, context):
    """Return facts about the machine: date, versions of the software, card and driver."""
    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "weftplan": mx.__version__,
             "numpy": np.__version__}  # fmt: skip
    xp = device.get(context(0)).xp
    if args.standin:
        return {**facts, "card": f"none: the stand-in for CuPy {xp.__version__}"}
    runtime = xp.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"].decode()
    driver = pathlib.Path("/sys/module/nvidia/version")
    return {**facts, "card": name, "driver": driver.read_text().strip() if driver.exists() else "unknown",
            "cuda of the driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion(),
            "cupy": xp.__version__}  # fmt: skip


@contextlib.contextmanager
def gpus(args):
    """Yield the function that makes GPU contexts; with ``--standin`` install the stand-in for CuPy during the block."""
    if args.standin:
        from tests.standin_cupy import installed

        with installed():
            yield mx.gpu
    else:
        yield mx.gpu


def show(report):
    """Print the report as a Markdown table."""
    facts = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    print(f"{facts}\n\n| part | what | value | goal | met |\n|---|---|---|---|---|")
    for name, part in report["parts"].items():
        for row in part["rows"]:
            goal = "" if row["goal"] is None else row["goal"]
            met = {True: "yes", False: "**no**", None: ""}[row["met"]]
            print(f"| {name} | {row['what']} | {row['value']} | {goal} | {met} |")
        if part["cut"]:
            print(f"| {name} | its share of the time was used up; the rest was left out | | | |")


class Rows(list):
    """The rows of a part. Each row is printed as JSON when it is appended, so that it survives if its process dies."""

    def append(self, row):
        """Append one row and print it."""
        super().append(row)
        print(json.dumps({"row": row}), flush=True)

    def extend(self, rows):
        """Append and print each of several rows."""
        for row in rows:
            self.append(row)


FAILED = {"what": "the part itself", "goal": "ends by itself", "met": False}


def alone(name, args):
    """Run one part in this process; print the machine's facts, the rows, and whether time ran out, as JSON lines."""
    clock, rows = Clock(args.seconds), Rows()
    with gpus(args) as context:
        print(json.dumps({"machine": machine(args, context)}), flush=True)
        try:
            PARTS[name](args, context, clock, rows)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            rows.append({**FAILED, "value": text[:400]})
        print(json.dumps({"cut": clock.cut}), flush=True)
        mx.nd.waitall()


def apart(name, args, seconds):
    """Run one part in its own process; return (facts of the machine, {"rows", "cut", "seconds"} of the part).

    If the process dies or is killed, its rows so far are returned, with a row that states the failure.
    """
    standin = ["--standin"] if args.standin or name == "launches" else []
    command = [
        sys.executable,
        __file__,
        *standin,
        "--part",
        name,
        "--seconds",
        str(seconds),
        "--every",
        str(args.every),
    ]
    start, facts = time.monotonic(), {}
    part = {"rows": [], "cut": False}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # pipes of a killed process may hang
        try:
            done = subprocess.run(command, stdout=out, stderr=err, timeout=seconds + START, check=False)
            why = "" if done.returncode == 0 else f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"killed after {seconds + START:.0f} s"
        for stream in (out, err):
            stream.seek(0)
        for line in out.read().splitlines():
            with contextlib.suppress(ValueError, AttributeError):  # a line cut off by a kill, or a library's output
                report = json.loads(line)
                facts = report.get("machine", facts)
                part["cut"] = report.get("cut", part["cut"])
                part["rows"] += [report["row"]] if "row" in report else []
        if why:
            said = " ".join(err.read().split())[-300:]
            part["rows"].append({**FAILED, "value": f"{why}: {said}"})
    part["seconds"] = round(time.monotonic() - start, 1)
    return facts, part


def main():
    """Run the parts, print the table, write JSON; return 1 if a row misses its goal, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--standin", action="store_true", help="run on the tests' stand-in for CuPy")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--seconds", type=float, default=480, help="time for all parts")
    parser.add_argument("--json", metavar="FILE", help="also write JSON, after every part")
    parser.add_argument("--every", type=int, default=1, help="on the stand-in: test every Nth operator")
    parser.add_argument("--part", choices=PARTS, help="run this part alone, in this process, and print it as JSON")
    args = parser.parse_args()
    if args.part:
        alone(args.part, args)
        return 0
    if not args.standin and not device.num_gpus():
        sys.exit("bench_gpu.py: there is no GPU for CuPy here; --standin runs on a machine without one")
    end = time.monotonic() + args.seconds
    report = {"machine": {}, "parts": {}}
    for number, name in enumerate(args.only):
        remaining = args.only[number:]
        left = end - time.monotonic() - START * len(remaining)
        facts, actual = apart(name, args, max(5.0, left * SHARES[name] / sum(SHARES[second] for second in remaining)))
        if args.standin or name != "launches":
            report["machine"] = facts or report["machine"]
        report["parts"][name] = actual
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(report) + "\n")
    show(report)
    return int(any(row["met"] is False for part in report["parts"].values() for row in part["rows"]))


if __name__ == "__main__":
    sys.exit(main())
