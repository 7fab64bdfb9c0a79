"""``weftplan cache``: list and clear the cache."""

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
    """Make a cache folder with three plans and no kernels; return its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.resolve()))
    place = user_cache.folder("plans")
    for name in ("01", "02", "a3"):
        assert user_cache.keep(place, name, bytes(1000))
    return tmp_path.resolve()


def run(*args: str) -> str:
    """Run ``weftplan cache`` and return its output."""
    done = CliRunner().invoke(main, ["cache", *args])
    assert done.exit_code == 0, done.output
    return done.output


def test_size_and_place(caches: Path):
    """Each kind of file is listed with its number, size and folder, in text and JSON."""
    lines = run().splitlines()
    assert lines[0] == f"compiled kernels and measured times: 0 files, 0 B, in {caches}/weftplan/kernels"
    assert lines[1].startswith("plans of networks: 3 files, 3.07 KiB, in ")
    kernels, plans = json.loads(run("--json"))
    assert (kernels["files"], plans["files"], plans["most_files"]) == (0, 3, user_cache.MAX_FILES)
    assert plans["bytes"] > 3000
    assert not plans["cleared"]


def test_clear(caches: Path):
    """``--clear`` removes all files and prints their number; the cache can be used afterwards."""
    assert "removed 3 files" in run("--clear")
    assert not (caches / "weftplan" / "plans").exists()
    assert "removed 0 files" in run("--clear")
    assert user_cache.keep(user_cache.folder("plans"), "01", b"again")


def test_clear_while_another_process_stores(caches: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that is stored during ``--clear`` is removed, too."""
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
    """If others may write to a cache folder, the listing gives the reason why it is not used."""
    (caches / "weftplan" / "plans").chmod(0o777)
    assert "nothing can be kept there: " in run()
