"""How many of MXNet's own unit tests pass on weftplan?

Runs the symbolic files of MXNet's ``tests/python/unittest``, unmodified, with weftplan under the name ``mxnet`` and
MXNet's own ``test_utils.py``; each file in a child process, each test within a limit of processor time, so that other
work on the machine decides about nothing. With ``--mxnet-python`` the same files run on MXNet itself, which does not
pass all of them on today's NumPy and without a network; ``--mxnet-json`` takes its results from an earlier ``--json``.

    python bench/mxnet_own_tests.py MXNET_TREE [--mxnet-python PYTHON] [--files test_symbol,test_io] [--seeds 1]

With several ``--seeds`` or ``--engines`` the files run on weftplan once for each pair, and tests that do not end
the same way everywhere are listed.

    python bench/mxnet_own_tests.py MXNET_TREE --files test_symbol,test_executor --seeds 1,2,3,4,5 \\
        --engines NaiveEngine,ThreadedEngine,ThreadedEnginePerDevice

The tests want NumPy and SciPy; those of images want Pillow or OpenCV.
"""

import argparse
import contextlib
import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = Path(__file__).parent / "peers" / "own_tests_child.py"
ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).parent / "data" / "own_tests.json"
"""``files``: those to run; ``absent``: parts of MXNet that are absent on purpose, whose use makes a test out of scope;
``out_of_scope``: {file: {test: reason}} for reasons that the child cannot see by itself."""


IDLE = 5
"""A child that neither ends a test nor computes is given up after this number of limits of the clock."""


def start(python, path, only, *, tree, scratch, seed, engine, verbose):
    """Return a child that runs the tests named ``only``, and the end of the pipe that it reports to."""
    reading, writing = os.pipe()
    env = {**os.environ, "MXNET_TEST_SEED": str(seed), "MXNET_MODULE_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    env.pop("OWN_TESTS_TREE", None)
    if engine is not None:
        env["MXNET_ENGINE_TYPE"] = engine
    if tree is not None:
        env |= {"OWN_TESTS_TREE": str(tree), "PYTHONPATH": str(ROOT)}
    if verbose:
        env["OWN_TESTS_VERBOSE"] = "1"

    def third():
        os.dup2(writing, 3)

    process = subprocess.Popen(
        [python, str(CHILD), str(path), *only],
        cwd=scratch,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=None if verbose else subprocess.DEVNULL,
        stderr=None if verbose else subprocess.DEVNULL,
        preexec_fn=third,
        pass_fds=(3, writing),
        start_new_session=True,
    )
    os.close(writing)
    return process, os.fdopen(reading, "rb", buffering=0)


def processor_time(pid):
    """Seconds that a process and its dead children have computed; None if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def lines(process, pipe, limit):
    """Return a child's answer; None when it said nothing for ``limit`` seconds of its processor time, or for longer."""
    remaining = b""

    def given_up():
        used = processor_time(process.pid)
        passed = time.monotonic() - said
        return passed > limit if used is None or before is None else used - before > limit or passed > IDLE * limit

    with selectors.DefaultSelector() as chosen:
        chosen.register(pipe, selectors.EVENT_READ)
        while True:
            while b"\n" in remaining:
                line, remaining = remaining.split(b"\n", 1)
                yield json.loads(line)
            said, before = time.monotonic(), processor_time(process.pid)
            while not (ready := chosen.select(1.0)) and not given_up() and process.poll() is None:
                pass
            if not ready and process.poll() is None:
                yield None
                return
            piece = pipe.read(65536)
            if not piece:
                return
            remaining += piece


def run_file(python, path, *, tree, limit, seed, wanted, verbose, engine=None):
    """{test: (result, why)} of one file; a child that hangs or dies is replaced for the tests after it."""
    results, names = {}, None
    todo = None
    while todo is None or todo:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            process, pipe = start(
                python,
                path,
                todo or (),
                tree=tree,
                scratch=scratch,
                seed=seed,
                engine=engine,
                verbose=verbose and todo,
            )
            running = None
            for line in lines(process, pipe, limit):
                if line is None:
                    if running is not None:
                        results[running] = ("fail", f"no end within {limit} s")
                    break
                if line["kind"] == "broken":
                    results["(the whole file)"] = ("fail", line["why"])
                elif line["kind"] == "tests":
                    names = [name for name in line["names"] if not wanted or name in wanted]
                elif line["kind"] == "begin":
                    running = line["name"]
                elif line["kind"] == "end":
                    results[line["name"]], running = (line["result"], line["why"]), None
                elif line["kind"] == "done":
                    break
            else:
                if running is not None:
                    process.wait()
                    results[running] = ("fail", f"the process ended with {process.returncode}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            pipe.close()
        left = [name for name in names or () if name not in results]
        if todo is not None and left == todo:
            results.update((name, ("fail", "the process ended before it")) for name in left)
            left = []
        todo = left
    return results


KINDS = ("pass", "fail", "out", "skip")


def judged(found, reasons):
    """Results of weftplan's side, with the failures that are out of scope marked as such."""
    for test, reason in reasons.items():
        if found.get(test, ("pass",))[0] == "fail":
            found[test] = ("out", reason)
    return found


def counted(found):
    """{kind: number of tests}."""
    return {kind: sum(result == kind for result, _ in found.values()) for kind in KINDS}


def on_every_engine(args, files, table, folder):
    """Run the files for each engine and seed; print the counts and the differences, whose number is the exit status."""
    tests, passes = {}, {}
    for engine in args.engines or [None]:
        for seed in args.seeds:
            sums = dict.fromkeys(KINDS, 0)
            for name in files:
                actual = run_file(
                    sys.executable,
                    folder / f"{name}.py",
                    tree=args.tree.resolve(),
                    limit=args.limit,
                    seed=seed,
                    wanted=args.tests,
                    verbose=args.verbose,
                    engine=engine,
                )
                actual = judged(actual, table["out_of_scope"].get(name, {}))
                for kind, number in counted(actual).items():
                    sums[kind] += number
                for test, (result, why) in actual.items():
                    tests.setdefault(f"{name}: {test}", {})[engine, seed] = (result, why)
            passes[engine, seed] = sums
            counts = " ".join(f"{sums[kind]:5}" for kind in KINDS)
            print(f"{engine or 'as set':24} seed {seed}  {counts}", flush=True)
    different = 0
    for test, results in tests.items():
        kinds = {result for result, _ in results.values()}
        if len(kinds) > 1 or len(results) < len(passes):
            different += 1
            odd = {key: f"{result} {why}".strip() for key, (result, why) in results.items() if result != "pass"}
            print(f"    {test}: {odd}")
    print(f"{len(tests)} tests, {different} of them do not end the same way everywhere")
    return bool(different)


def names_of(text):
    """Return the names in a list with commas."""
    return [one for one in text.split(",") if one]


def arguments():
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="MXNet's source tree")
    parser.add_argument("--mxnet-python", help="a Python that has MXNet, NumPy < 1.24 and SciPy")
    parser.add_argument("--mxnet-json", type=Path, help="MXNet's results of an earlier run with --json")
    parser.add_argument("--files", type=names_of, help="names of files, with commas between; default: all of the list")
    parser.add_argument("--tests", type=names_of, default=[], help="names of tests, with commas between")
    parser.add_argument("--seeds", type=lambda text: [*map(int, names_of(text))], default=[1], help="default: 1")
    parser.add_argument("--engines", type=names_of, default=[], help="values of MXNET_ENGINE_TYPE")
    parser.add_argument("--limit", type=float, default=120, help="seconds of processor time for one test")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--only-mxnet", action="store_true", help="leave weftplan out")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what tests print, and tracebacks")
    return parser.parse_args()


def main():
    """Run, and print the table."""
    args = arguments()
    folder = args.tree.resolve() / "tests" / "python" / "unittest"
    table = json.loads(TABLE.read_text())
    files = args.files or table["files"]
    several = len(args.seeds) > 1 or args.engines
    which = ", ".join(map(str, args.seeds))
    print(f"MXNet's own tests, seed {which}, Python {platform.python_version()}, {os.cpu_count()} cores")
    if several:
        print(f"{'engine':24} {'':6}  {'pass':>5} {'fail':>5} {'out':>5} {'skip':>5}")
        return on_every_engine(args, files, table, folder)
    earlier = json.loads(args.mxnet_json.read_text()) if args.mxnet_json else {}
    beside = bool(args.mxnet_python or args.mxnet_json)
    everything, total, own_total = {}, dict.fromkeys(KINDS, 0), [0, 0]
    print(f"{'file':24} {'pass':>5} {'fail':>5} {'out':>5} {'skip':>5}" + ("  MXNet" if beside else ""))
    for name in files:
        path = folder / f"{name}.py"
        common = {"limit": args.limit, "seed": args.seeds[0], "wanted": args.tests, "verbose": args.verbose}
        results = {} if args.only_mxnet else run_file(sys.executable, path, tree=args.tree.resolve(), **common)
        results = judged(results, table["out_of_scope"].get(name, {}))
        own = earlier.get(name, {}).get("mxnet", {})
        if not own and args.mxnet_python:
            own = run_file(args.mxnet_python, path, tree=None, **common)
        counts = counted(results)
        for kind, number in counts.items():
            total[kind] += number
        passed = counted(own)["pass"]
        own_total = [own_total[0] + passed, own_total[1] + len(own)]
        row = f"{name:24} " + " ".join(f"{counts[kind]:5}" for kind in KINDS)
        print(row + (f"  {passed} of {len(own)}" if beside else ""), flush=True)
        for test, (result, why) in results.items():
            if result == "fail":
                also = f"  [MXNet: {own[test][0]}]" if own.get(test, ("pass",))[0] != "pass" else ""
                print(f"    {test}: {why}{also}", flush=True)
        everything[name] = {"weftplan": results, "mxnet": own}
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1))
    row = f"{'all':24} " + " ".join(f"{total[kind]:5}" for kind in KINDS)
    print(row + (f"  {own_total[0]} of {own_total[1]}" if beside else ""))
    return False


if __name__ == "__main__":
    sys.exit(main())
