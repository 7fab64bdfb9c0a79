"""How many of MXNet's own unit tests pass on weftplan?

Runs the symbolic files of MXNet's ``tests/python/unittest``, unmodified, with weftplan under the name ``mxnet`` and
MXNet's own ``test_utils.py``. Each file runs in a child process. The limit of a test is processor time, so that other
work on the machine changes no result. With ``--mxnet-python`` the same files run on MXNet itself, which fails some of
them on today's NumPy or without a network; ``--mxnet-json`` reads its results from an earlier ``--json``.

    python bench/mxnet_own_tests.py MXNET_TREE [--mxnet-python PYTHON] [--files test_symbol,test_io] [--named]

The last lines count the passes among all tests of the files. Every other test counts as a failure, a test that the file
itself skips, or a test out of scope: a part of MXNet that is left out, a difference that docs/mxnet-differences.md
documents, or something in the test that today's NumPy or a machine without a network refuses. ``--named`` lists each.

With several ``--seeds`` or any ``--engines``, the files run on weftplan once for each pair, and tests whose results
differ are listed.

    python bench/mxnet_own_tests.py MXNET_TREE --files test_symbol,test_executor --seeds 1,2,3,4,5 \\
        --engines NaiveEngine,ThreadedEngine,ThreadedEnginePerDevice

The tests need NumPy and SciPy; tests of images need Pillow, and OpenCV for the values that they expect.
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
"""The list of files and tests, an object with three keys.

* ``files``: the files to run.
* ``absent``: parts of MXNet that weftplan leaves out on purpose; a test that uses one is out of scope.
* ``out_of_scope``: {kind: {file: {test: reason}}}, for reasons that the child cannot detect. A kind is a key of
  ``WHY``.
"""


IDLE = 5
"""A child that reports nothing and computes nothing is killed after this multiple of the limit, in wall time."""


def start(python, path, only, *, tree, scratch, seed, engine, verbose):
    """Start a child that runs the tests named ``only``; return (process, read end of the pipe for its reports)."""
    reading, writing = os.pipe()
    env = {**os.environ, "MXNET_TEST_SEED": str(seed), "MXNET_MODULE_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    env.pop("OWN_TESTS_TREE", None)
    if engine is not None:
        env["MXNET_ENGINE_TYPE"] = engine
    if tree is not None:
        folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"OWN_TESTS_TREE": str(tree), "PYTHONPATH": os.pathsep.join(folders)}
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
    """Return the CPU seconds of a process and its dead children so far, or None if the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def lines(process, pipe, limit):
    """Yield a child's reports. Yield None and stop if the child reports nothing for ``limit`` seconds of its CPU time.

    Wall time counts instead if CPU time is unknown, and ``IDLE * limit`` seconds of it always suffice.
    """
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
    """Return {test: (result, reason)} of one file. If a child hangs or dies, a new child runs the remaining tests."""
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


WHY = {
    "left out": "use a part of MXNet that is left out",
    "documented": "expect what docs/mxnet-differences.md documents as different",
    "NumPy": "do what today's NumPy refuses",
    "network": "need the network",
}
"""{kind of reasons: what tests of this kind do}."""


def mark_out_of_scope(results, name, reasons):
    """Mark failures of file ``name`` that ``reasons`` has as out of scope, in place, and return the results.

    Reasons of results that are out of scope then begin with their kind.
    """
    for test, (result, why) in results.items():
        if result == "out":
            results[test] = ("out", f"left out: {why}")
        for kind, files in reasons.items():
            if result in ("fail", "out") and test in files.get(name, {}):
                results[test] = ("out", f"{kind}: {files[name][test]}")
    return results


def report(everything, named):
    """Print how many tests pass, and how many do not for which reason; with ``named`` each of these."""
    results = [(f"{name}: {test}", *result) for name, both in everything.items() for test, result in both.items()]
    passed = sum(result == "pass" for _, result, _ in results)
    print(f"{passed} of {len(results)} tests pass ({passed / max(1, len(results)):.1%})")
    groups = {f"out of scope: {what}": ("out", kind) for kind, what in WHY.items()}
    for title, (result, start) in {**groups, "skipped by the file": ("skip", ""), "failed": ("fail", "")}.items():
        tests = [(test, why) for test, kind, why in results if kind == result and why.startswith(start)]
        print(f"{len(tests):5} {title}")
        for test, why in tests if named else ():
            print(f"          {test}: {why.removeprefix(f'{start}: ')}")


def count_kinds(results):
    """Return {kind: number of tests}."""
    return {kind: sum(result == kind for result, _ in results.values()) for kind in KINDS}


def on_every_engine(args, files, table, folder):
    """Run the files with each engine and seed, print the counts, and return whether any test has different results."""
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
                actual = mark_out_of_scope(actual, name, table["out_of_scope"])
                for kind, number in count_kinds(actual).items():
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
    """Return the names in a comma-separated list."""
    return [one for one in text.split(",") if one]


def arguments():
    """Parse the command line."""
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
    parser.add_argument("--named", action="store_true", help="name each test that does not pass, with the reason")
    parser.add_argument("--only-mxnet", action="store_true", help="leave weftplan out")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what tests print, and tracebacks")
    return parser.parse_args()


def main():
    """Run the files and print the table; return whether results differ between seeds or engines."""
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
        results = mark_out_of_scope(results, name, table["out_of_scope"])
        own = earlier.get(name, {}).get("mxnet", {})
        if not own and args.mxnet_python:
            own = run_file(args.mxnet_python, path, tree=None, **common)
        counts = count_kinds(results)
        for kind, number in counts.items():
            total[kind] += number
        passed = count_kinds(own)["pass"]
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
    if not args.only_mxnet:
        report({name: both["weftplan"] for name, both in everything.items()}, args.named)
    return False


if __name__ == "__main__":
    sys.exit(main())
