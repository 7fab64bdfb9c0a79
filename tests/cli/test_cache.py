"""``weftplan cache``: the cache's contents, and clearing it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from weftplan.cli import main
from weftplan.support import user_cache


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with three plans and no kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.resolve()))
    place = user_cache.folder("plans")
    for name in ("01", "02", "a3"):
        assert user_cache.keep(place, name, bytes(1000))
    return tmp_path.resolve()


def run(*args: str) -> str:
    """Return the command's output."""
    done = CliRunner().invoke(main, ["cache", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_size_and_place(caches: Path):
    """Each kind of files with its number, size and folder."""
    lines = run().splitlines()
    assert lines[0] == f"compiled kernels and measured times: 0 files, 0 B, in {caches}/weftplan/kernels"
    assert lines[1].startswith("plans of networks: 3 files, 3.07 KiB, in ")
    kernels, plans = json.loads(run("--json"))
    assert (kernels["files"], plans["files"], plans["most_files"]) == (0, 3, user_cache.MOST_FILES)
    assert plans["bytes"] > 3000
    assert not plans["cleared"]


def test_clear(caches: Path):
    """It reports the removed files; afterwards the cache is empty, and a second call does nothing."""
    assert "removed 3 files" in run("--clear")
    assert not (caches / "weftplan" / "plans").exists()
    assert "removed 0 files" in run("--clear")
    assert user_cache.keep(user_cache.folder("plans"), "01", b"again")


def test_clear_while_another_process_stores(caches: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that appears in a folder being removed is removed, too."""
    place, rmdir, stored = user_cache.folder("plans"), os.rmdir, []
    assert place is not None

    def late(path: object, *args: object, **options: object) -> None:
        if str(path).endswith("plans") and not stored:
            stored.append(user_cache.keep(place, "01", b"late"))
        rmdir(path, *args, **options)

    monkeypatch.setattr(os, "rmdir", late)
    assert "removed 3 files" in run("--clear")
    assert stored == [True]
    assert not place.exists()


def test_a_folder_that_is_refused(caches: Path):
    """The reason stands below the folder."""
    (caches / "weftplan" / "plans").chmod(0o777)
    assert "nothing can be kept there: " in run()
