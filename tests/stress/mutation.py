"""Mutation testing of the core: ``python -m tests.stress.mutation AREA SEED COUNT [--tests TREE]``; see ``AREAS``.

Each mutant is the package with one small mistake: an inverted comparison, a number that is off by one, a negated
condition, a removed statement. The tests of the area run on a copy of the tree with that mistake, up to the first
failure. A mutant without a failing test has *survived*: either the mistake has no visible effect, or a test is missing.
A mutant that hangs the tests counts as killed by time.

A SEED chooses the same mutants as long as their lines exist, whatever changes around them. Two versions of the tests
can thus be compared: ``--tests TREE`` uses the folder ``tests`` of another checkout.

With ``--lines DATA`` only the tests that run the mutated line judge a mutant, which takes seconds instead of minutes.
The data comes from ``coverage run --source weftplan -m pytest -p tests.stress.mutation TESTS``, with ``relative_files``
set in coverage's configuration; coverage is no dependency. A mutant on a line without such a test is judged by the
whole area: lines that run in an import, or in child processes alone.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    "engine": "tests/contract/test_engine_*.py tests/engine",
    "tasks": "tests/engine",
    "executor": "tests/executor tests/training/test_m[ei]*.py",
    "planner": "tests/contract/test_planner.py tests/planner",
    "kvstore": "tests/contract/test_kvstore*.py tests/kvstore",
    "storage": "tests/contract/test_storage.py tests/storage tests/device",
    "training": "tests/training tests/golden",
    "data": "tests/contract/test_iterators.py tests/data tests/basics",
    "torch": "tests/torch",
    "ndarray": "tests/ndarray tests/compat",
    "symbol": "tests/symbol tests/compat",
    "ops": "tests/ops tests/ndarray",
    "rnn": "tests/rnn tests/golden",
    "convert": "tests/convert",
    "cli": "tests/cli",
}
"""For each room its tests. At least one test must fail for each mutant that changes something."""

MEMORY = 16 << 30
"""Limit of a child's address space in bytes: a mutant may allocate for ever."""

CHILD = """
import os, sys, pytest
code = int(pytest.main(sys.argv[1:]))
sys.stdout.flush()
os._exit(code)
"""
"""Program of a child; it exits without joining threads, because a hung mutant must not keep the process alive."""

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SWAPPED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.BitOr: "&", ast.BitAnd: "|"}


@dataclass(frozen=True)
class Mutant:
    """One small mistake: a replaced range of bytes in a file."""

    path: str
    line: int
    start: int
    end: int
    text: str
    name: str

    def rank(self, seed: str) -> bytes:
        """Return the sort key of the mutant for a seed; the mutants with the smallest keys are chosen."""
        return hashlib.sha256(f"{seed} {self.path} {self.name}".encode()).digest()


class Sites(ast.NodeVisitor):
    """Visitor that collects the mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.starts = [0]
        for row in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(row))
        self.inside: list[str] = []
        self.seen = collections.Counter[str]()

    def add(self, node: ast.AST, text: str) -> None:
        """Add a mutant with ``text`` in place of ``node``."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        name = f"{'.'.join(self.inside)}: {ast.unparse(node)[:70]} -> {text[:70]}"
        self.seen[name] += 1
        if self.seen[name] > 1:
            name += f" (number {self.seen[name]})"
        self.found.append(Mutant(self.path, node.lineno, start, end, text, name))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.inside.append(node.name)
        for part in node.body:
            self.visit(part)
        self.inside.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_Raise(self, node: ast.Raise) -> None:
        """Do nothing: statements of this kind have no mutants."""

    visit_JoinedStr = visit_Import = visit_ImportFrom = visit_AnnAssign = visit_Assert = visit_Raise

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.add(node.test, f"(not ({ast.unparse(node.test)}))")
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            self.add(node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPPED:
            self.add(node, f"({ast.unparse(node.left)} {SWAPPED[type(node.op)]} {ast.unparse(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.Or) else " or "
        self.add(node, "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(node, str(node.value + 1))
        elif type(node.value) is bool:
            self.add(node, str(not node.value))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.add(node, "return None")
        self.generic_visit(node)


def mutants(area: str) -> Iterator[Mutant]:
    """Yield every mutant of a room, in the order of its modules."""
    for file in sorted((ROOT / "weftplan" / area).rglob("*.py")):
        path, source = str(file.relative_to(ROOT)), file.read_text()
        sites = Sites(path, source)
        sites.visit(ast.parse(source))
        yield from sites.found


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let coverage record lines by test; for ``coverage run -m pytest -p tests.stress.mutation``."""
    coverage = __import__("coverage").Coverage.current()
    if coverage is not None:
        coverage.switch_context(nodeid)


class TestsByLine:
    """The tests that run each line, from a data file of coverage with contexts."""

    def __init__(self, file: Path) -> None:
        self.data = __import__("coverage").CoverageData(str(file))
        self.data.read()

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the line of the mutant: 40 that are spread over all of them, then the others."""
        contexts = self.data.contexts_by_lineno(mutant.path) or self.data.contexts_by_lineno(str(ROOT / mutant.path))
        tests = sorted(test for test in contexts.get(mutant.line, []) if test)
        spread = tests[:: -(-len(tests) // 40) or 1]
        return spread + [test for test in tests if test not in set(spread)]


def run(tree: Path, tests: list[str], seconds: float) -> tuple[str, float]:
    """Run tests on a tree; return the result and the duration in seconds.

    The result is "survived", "killed by time", "killed by a crash" or "killed by" the failed test.
    """
    begun = time.monotonic()
    command = [sys.executable, "-c", CHILD, "-q", "-x", "-p", "no:cacheprovider"]
    # Bytecode is written, so that everything but the mutant is compiled once.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    child = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    try:
        printed, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "killed by time", time.monotonic() - begun
    finally:  # end all processes started by the tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if child.returncode == 0:
        said = "survived"
    else:
        said = f"killed by {failed[0].split(' - ')[0].split()[1]}" if failed else "killed by a crash"
    return said, time.monotonic() - begun


def main() -> None:
    """Run the tests on each chosen mutant; print a line per mutant and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("seed")
    parser.add_argument("count", type=int)
    parser.add_argument("--only", type=Path, help="a file; mutants whose lines do not stand in it are left out")
    parser.add_argument("--paths", help="the tests to run, with wildcards, instead of all that are meant for the area")
    parser.add_argument("--lines", type=Path, help="data of coverage: which tests run a line")
    parser.add_argument("--seconds", type=float, help="time for a mutant; without it all tests run once to find out")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout whose tests are judged")
    arguments = parser.parse_args()
    chosen = sorted(mutants(arguments.area), key=lambda mutant: mutant.rank(arguments.seed))[: arguments.count]
    if arguments.only is not None:
        lines = arguments.only.read_text()
        chosen = [mutant for mutant in chosen if f"survived  {mutant.name}" in lines]
    tally = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for item in arguments.tests.iterdir():
            if item.name not in ("weftplan", ".venv", ".git"):
                (shutil.copytree if item.is_dir() else shutil.copy2)(item, tree / item.name)
        shutil.copytree(ROOT / "weftplan", tree / "weftplan", ignore=shutil.ignore_patterns("__pycache__"))
        tests = [
            str(p.relative_to(tree))
            for t in (arguments.paths or AREAS[arguments.area]).split()
            for p in sorted(tree.glob(t))
        ]
        by_line = TestsByLine(arguments.lines) if arguments.lines else None
        limit = arguments.seconds
        if limit is None:
            said, usual = run(tree, tests, 1800)
            print(f"without a mistake: {said}, {usual:.0f} s", flush=True)
            if said != "survived":
                raise SystemExit("the tests must pass before they can judge")
            limit = 3 * usual + 60
        for mutant in chosen:
            target = tree / mutant.path
            source = (ROOT / mutant.path).read_bytes()
            target.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
            said, took = run(tree, (by_line and by_line.tests_of(mutant)) or tests, limit)
            target.write_bytes(source)
            shutil.rmtree(target.parent / "__pycache__")  # a mutant may have the size and time stamp of its successor
            tally[said if not said.startswith("killed by ") or said == "killed by time" else "killed"] += 1
            print(f"{took:5.0f} s  {mutant.path}:{mutant.line} {said}  {mutant.name}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in tally.items()), f"of {len(chosen)} mutants")


if __name__ == "__main__":
    main()
