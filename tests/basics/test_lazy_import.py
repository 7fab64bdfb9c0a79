"""A lazy import completes even if a signal arrives meanwhile."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weftplan.support.lazy_import import late_import

PACKAGE = Path(__file__).parents[2] / "weftplan"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a package ``interrupted_`` whose module raises SIGINT during its import; return its folder."""
    package = tmp_path / "interrupted_"
    package.mkdir()
    (package / "__init__.py").write_text("from interrupted_ import first\nassert first.child.value == 1\n")
    (package / "first.py").write_text("import interrupted_.child as child\n")
    (package / "child.py").write_text("import signal\nvalue = 1\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield package
    signal.signal(signal.SIGINT, before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "interrupted_"]:
        del sys.modules[name]


def test_interrupt_is_raised_after_the_import(folder: Path):
    """Ctrl-C during a lazy import is raised after the import, which is complete."""
    with pytest.raises(KeyboardInterrupt):
        late_import("interrupted_")
    assert sys.modules["interrupted_"].child.value == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    late_import("interrupted_")


def test_user_handler_is_called_once(folder: Path):
    """A user's signal handler is called once, and the import succeeds."""
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    assert late_import("interrupted_").child.value == 1
    assert seen == [signal.SIGINT]


def test_nested_lazy_import(folder: Path):
    """Ctrl-C in a nested lazy import is raised after the outer import."""
    (folder / "outer.py").write_text(
        textwrap.dedent("""
        from weftplan.support.lazy_import import late_import
        late_import("interrupted_.grandchild")
        done = True
        """)
    )
    (folder / "__init__.py").write_text("")
    (folder / "grandchild.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        late_import("interrupted_.outer")
    assert sys.modules["interrupted_.outer"].done


def test_a_handler_that_the_import_installs_stays(folder: Path):
    """A signal handler that the imported module installs is kept."""
    (folder / "__init__.py").write_text("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n")
    late_import("interrupted_")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_failed_import_leaves_the_handler(folder: Path):
    """A failing import raises its own error, and the signal handler is restored."""
    (folder / "__init__.py").write_text("raise ImportError('no such luck')\n")
    with pytest.raises(ImportError, match="no such luck"):
        late_import("interrupted_")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_do_not_touch_the_handler(folder: Path):
    """A lazy import works on another thread, which cannot install signal handlers."""
    (folder / "child.py").write_text("value = 1\n")
    handlers: list[int] = []
    thread = threading.Thread(target=lambda: handlers.append(late_import("interrupted_").child.value))
    thread.start()
    thread.join()
    assert handlers == [1]


def test_parts_of_the_package_are_imported_wholly():
    """Only the command line imports modules of the package with import_module directly."""
    direct = re.compile(r"import_module\(\s*f?[\"']weftplan")
    files = [path for path in PACKAGE.rglob("*.py") if "cli" not in path.parts]
    assert len(files) > 100
    assert [path.name for path in files if direct.search(path.read_text())] == []
