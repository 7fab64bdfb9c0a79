"""Files in the user's cache folder are not loaded or written if other users can write to their path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weftplan.support import user_cache

posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


@posix
def test_folders_that_others_can_write_are_refused(tmp_path: Path):
    """A folder with permissions for others, a link to a folder, and a folder in a writable parent are refused."""
    place = tmp_path.resolve() / "above" / "kernels"
    place.mkdir(parents=True, mode=0o700)
    assert user_cache.refusal(place) is None
    assert user_cache.keep(place, "one", b"content")
    assert user_cache.load(place, "one") == b"content"
    for mode in (0o770, 0o707, 0o702, 0o750):
        place.chmod(mode)
        assert "permissions for others" in str(user_cache.refusal(place))
        assert user_cache.load(place, "one") is None
        assert not user_cache.keep(place, "two", b"content")
    place.chmod(0o700)
    place.parent.chmod(0o777)
    assert "can be written by others" in str(user_cache.refusal(place))
    assert user_cache.load(place, "one") is None
    place.parent.chmod(0o1777)  # like /tmp: others cannot rename this user's files
    assert user_cache.load(place, "one") == b"content"
    place.parent.chmod(0o755)
    link = place.parent / "link"
    link.symlink_to(place)
    assert "no folder" in str(user_cache.refusal(link))
    assert user_cache.load(link, "one") is None
    (place / "o" / "other").symlink_to(place / "o" / "one")
    assert user_cache.load(place, "other") is None


@posix
def test_targets_of_links_are_checked(tmp_path: Path):
    """The target of a link in the path is checked, too; a named pipe in the cache is not read."""
    real = tmp_path.resolve() / "shared" / "real"
    real.mkdir(parents=True)
    link = tmp_path.resolve() / "link"
    link.symlink_to(real)
    assert user_cache.keep(link / "kernels", "one", b"content")
    assert user_cache.load(link / "kernels", "one") == b"content"
    real.parent.chmod(0o777)
    assert user_cache.refusal(link / "kernels") == f"{real.parent} can be written by others"
    assert user_cache.load(link / "kernels", "one") is None
    real.parent.chmod(0o755)
    (real / "kernels" / "p").mkdir()
    os.mkfifo(real / "kernels" / "p" / "pipe", 0o600)
    assert user_cache.load(link / "kernels", "pipe") is None


@posix
def test_reason_is_known_before_the_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``obstacle`` returns the reason why a folder cannot be created or used, or None."""
    place = tmp_path.resolve() / "home" / "weftplan" / "kernels"
    assert user_cache.obstacle(place) is None
    place.parent.parent.write_text("a file")
    assert user_cache.obstacle(place) == f"{tmp_path.resolve()}/home is no folder"
    assert not user_cache.keep(place, "one", b"content")
    place.parent.parent.unlink()
    assert user_cache.keep(place, "one", b"content")
    assert user_cache.obstacle(place) is None
    place.chmod(0o755)
    assert "permissions for others" in str(user_cache.obstacle(place))
    place.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only file system
    assert user_cache.obstacle(place) == f"{place} cannot be written"


@posix
@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can give folders away")
def test_folders_of_other_users_are_refused(tmp_path: Path):
    """A folder or file of another user is not loaded."""
    place = tmp_path.resolve() / "kernels"
    place.mkdir(mode=0o700)
    assert user_cache.keep(place, "one", b"content")
    os.chown(place / "o" / "one", 12345, 12345)
    assert user_cache.load(place, "one") is None
    os.chown(place / "o" / "one", 0, 0)
    os.chown(place, 12345, 12345)
    assert "belongs to another user" in str(user_cache.refusal(place))
    assert user_cache.load(place, "one") is None


@posix
def test_location_of_the_cache(monkeypatch: pytest.MonkeyPatch):
    """The cache is in XDG_CACHE_HOME if absolute, else in the home folder, else absent."""
    monkeypatch.setattr(sys, "platform", "linux")
    assert user_cache.folder("kernels", {"XDG_CACHE_HOME": "/a", "HOME": "/h"}) == Path("/a/weftplan/kernels")
    assert user_cache.folder("kernels", {"XDG_CACHE_HOME": "a", "HOME": "/h"}) == Path("/h/.cache/weftplan/kernels")
    assert user_cache.folder("kernels", {"HOME": "relative"}) is None
    assert user_cache.folder("kernels", {}) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache.folder("kernels", {"HOME": "/h"}) == Path("/h/Library/Caches/weftplan/kernels")


@posix
@pytest.mark.parametrize("limit", ["MOST", "MAX_FILES"])
def test_oldest_files_are_removed(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write beyond the limit removes the oldest files of a sub-folder, and files of an earlier release."""
    for kind in user_cache.KINDS:
        place = tmp_path.resolve() / kind
        for k in range(6):
            assert user_cache.keep(place, f"0{k + 1}", b"content")
            os.utime(place / "0" / f"0{k + 1}", ns=(k, k))
        size = (place / "0" / "01").stat().st_size
        assert user_cache.usage(place) == (6, 6 * size)
        (place / "flat").write_bytes(b"of an earlier release")
        monkeypatch.setattr(user_cache, limit, 16 * (4 if limit == "MAX_FILES" else 4 * size))
        assert user_cache.keep(place, "00", b"content")
        assert sorted(os.listdir(place / "0")) == ["00", "04", "05", "06"]
        assert os.listdir(place) == ["0"]
        monkeypatch.undo()
        user_cache.clear(place)
        assert not place.exists()
        user_cache.clear(place)


@posix
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
@pytest.mark.parametrize("present", [None, 0o775, 0o755, 0o700])
def test_files_are_cached_under_every_umask(umask: int, present: int | None, tmp_path: Path):
    """New folders are private under any umask; the package's own open folders are made private."""
    place = tmp_path.resolve() / "caches" / "weftplan" / "plans"
    if present is not None:
        place.parent.parent.mkdir(mode=0o700)
        place.parent.mkdir()
        place.parent.chmod(present)
    before = os.umask(umask)
    try:
        assert user_cache.keep(place, "one", b"content")
    finally:
        os.umask(before)
    assert user_cache.refusal(place) is None
    assert user_cache.load(place, "one") == b"content"


@posix
def test_a_refused_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """If others can write to the cache's path, one log message names the folder and the reason."""
    shared = tmp_path.resolve() / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    place = shared / "weftplan" / "plans"
    assert not user_cache.keep(place, "one", b"content")
    assert not user_cache.keep(place, "two", b"content")
    (message,) = caplog.messages
    assert message.startswith(f"nothing is kept in {place}")
    assert message.endswith(f"{shared} can be written by others")


@posix
def test_every_folder_and_link_on_the_way_counts(tmp_path: Path):
    """A link anywhere in the path refuses the cache if others can write to the link's folder."""
    base = tmp_path.resolve()
    (base / "real").mkdir()
    (base / "open").mkdir()
    (base / "open" / "link").symlink_to(base / "real")
    (base / "closed").mkdir()
    (base / "closed" / "link").symlink_to("../open/link")
    for link in ("open/link", "closed/link"):
        place = base / link / "weftplan" / "plans"
        assert user_cache.keep(place, "one", b"content")
        (base / "open").chmod(0o777)
        assert user_cache.refusal(place) == f"{base}/open can be written by others"
        assert user_cache.load(place, "one") is None
        (base / "open").chmod(0o755)
        assert user_cache.load(place, "one") == b"content"
