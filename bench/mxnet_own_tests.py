"""How many of MXNet's own unit tests pass on weftplan?

Runs the symbolic files of MXNet's ``tests/python/unittest``, unmodified, with weftplan under the name ``mxnet`` and
MXNet's own ``test_utils.py``; each file in a child process, each test within a time limit. With ``--mxnet-python`` the
same files run on MXNet itself, which does not pass all of them on today's NumPy and without a network.

    python bench/mxnet_own_tests.py MXNET_TREE [--mxnet-python PYTHON] [--files test_symbol,test_io] [--seed 1]

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
``out_of_scope``: {file: {test: reason}} for what the child cannot see by itself."""


def start(python, path, only, *, tree, scratch, seed, verbose):
    """A child that runs the tests named ``only``, and the end of the pipe that it reports to."""
    reading, writing = os.pipe()
    env = {**os.environ, "MXNET_TEST_SEED": str(seed), "MXNET_MODULE_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    env.pop("OWN_TESTS_TREE", None)
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


def lines(process, pipe, limit):
    """What a child says; None when it said nothing for ``limit`` seconds."""
    rest = b""
    with selectors.DefaultSelector() as chosen:
        chosen.register(pipe, selectors.EVENT_READ)
        while True:
            while b"\n" in rest:
                line, rest = rest.split(b"\n", 1)
                yield json.loads(line)
            end = time.monotonic() + limit
            while not (ready := chosen.select(1.0)) and time.monotonic() < end and process.poll() is None:
                pass
            if not ready and process.poll() is None:
                yield None
                return
            piece = pipe.read(65536)
            if not piece:
                return
            rest += piece


def run_file(python, path, *, tree, limit, seed, wanted, verbose):
    """{test: (result, why)} of one file; a child that hangs or dies is replaced for the tests behind."""
    results, names = {}, None
    todo = None
    while todo is None or todo:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            process, pipe = start(
                python, path, todo or (), tree=tree, scratch=scratch, seed=seed, verbose=verbose and todo
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


def main():
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="MXNet's source tree")
    parser.add_argument("--mxnet-python", help="a Python that has MXNet, NumPy < 1.24 and SciPy")
    parser.add_argument("--files", default="", help="names of files, with commas between; default: all of the list")
    parser.add_argument("--tests", default="", help="names of tests, with commas between")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for one test")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--only-mxnet", action="store_true", help="leave weftplan out")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what tests print, and tracebacks")
    args = parser.parse_args()
    folder = args.tree.resolve() / "tests" / "python" / "unittest"
    table = json.loads(TABLE.read_text())
    everything, total = {}, {"pass": 0, "fail": 0, "out": 0, "skip": 0, "own": 0, "both": 0}
    print(f"MXNet's own tests, seed {args.seed}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"{'file':24} {'pass':>5} {'fail':>5} {'out':>5} {'skip':>5}" + ("  MXNet" if args.mxnet_python else ""))
    for name in [one for one in args.files.split(",") if one] or table["files"]:
        path = folder / f"{name}.py"
        wanted = {one for one in args.tests.split(",") if one}
        common = {"limit": args.limit, "seed": args.seed, "wanted": wanted, "verbose": args.verbose}
        found = {} if args.only_mxnet else run_file(sys.executable, path, tree=args.tree.resolve(), **common)
        for test, reason in table["out_of_scope"].get(name, {}).items():
            if found.get(test, ("pass",))[0] == "fail":
                found[test] = ("out", reason)
        own = run_file(args.mxnet_python, path, tree=None, **common) if args.mxnet_python else {}
        counts = {kind: sum(r[0] == kind for r in found.values()) for kind in ("pass", "fail", "out", "skip")}
        counts["own"] = sum(r[0] == "pass" for r in own.values())
        for kind, number in counts.items():
            total[kind] += number
        row = f"{name:24} " + " ".join(f"{counts[kind]:5}" for kind in ("pass", "fail", "out", "skip"))
        print(row + (f"  {counts['own']} of {len(own)}" if args.mxnet_python else ""), flush=True)
        for test, (result, why) in found.items():
            if result == "fail":
                also = f"  [MXNet: {own[test][0]}]" if own.get(test, ("pass",))[0] != "pass" else ""
                print(f"    {test}: {why}{also}", flush=True)
        everything[name] = {"weftplan": found, "mxnet": own}
        if args.json:
            args.json.write_text(json.dumps(everything, indent=1))
    print(f"{'all':24} " + " ".join(f"{total[kind]:5}" for kind in ("pass", "fail", "out", "skip"))
          + (f"  {total['own']}" if args.mxnet_python else ""))  # fmt: skip


if __name__ == "__main__":
    main()
