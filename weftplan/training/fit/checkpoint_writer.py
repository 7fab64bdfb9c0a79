"""Run checkpoints: written atomically on a background thread, pruned, and read again on resume.

A checkpoint is a safetensors file, ``<prefix>-step<number of updates>.safetensors``. It holds parameters and auxiliary
states under their names, and all other state that a bit-identical resume needs. The training thread gathers copies
(:mod:`weftplan.training.fit.run_state`). A background thread waits for the copies and writes one file at a time. A file
receives its name only after its bytes are on disk, so killing the process at any moment is safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.errors import FormatError, ParameterError
from weftplan.ndarray import NDArray
from weftplan.ndarray.formats import safetensors as file_format
from weftplan.support.array_types import RawArray
from weftplan.support.package_log import log
from weftplan.training.fit.parameter_files import BESIDES, named_in, parameter_metadata
from weftplan.training.fit.run_state import as_arrays

VERSION = 1
"""Version of the facts in a checkpoint; files with another version are refused."""
_FACTS = "weftplan.run"
_CHECKSUM = "weftplan.crc32"
_STEP = re.compile(r"-step(\d+)\.safetensors$")


@dataclass(slots=True)
class CheckpointSnapshot:
    """State of a run between two updates: copies of arrays, possibly still pending, and plain facts."""

    args: dict[str, NDArray]
    aux: dict[str, NDArray]
    besides: dict[str, Any]
    """Arrays that are not parameters, under names that do not clash with parameters."""
    facts: dict[str, Any]


@dataclass(slots=True)
class Saved:
    """Checkpoint read from a file."""

    path: Path
    args: dict[str, NDArray]
    aux: dict[str, NDArray]
    arrays: dict[str, Any]
    facts: dict[str, Any] = field(repr=False)


def write_snapshot(path: Path, snapshot: CheckpointSnapshot) -> int:
    """Write a snapshot atomically, after waiting for its copies; returns the bytes of its arrays.

    Raises:
        OSError: the file cannot be written; the previous file stays.
    """
    arrays, metadata = _contents(snapshot)
    file_format.write(path, arrays, metadata)
    return sum(values.nbytes for values in arrays.values())


def encode_snapshot(snapshot: CheckpointSnapshot) -> bytes:
    """Return the content of the file of :func:`write_snapshot`, after waiting for the copies."""
    return b"".join(file_format.encode(*_contents(snapshot), "a checkpoint in memory"))


def _contents(snapshot: CheckpointSnapshot) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays and the metadata of a snapshot."""
    arrays = {
        name: value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)
        for name, value in (*snapshot.args.items(), *snapshot.aux.items(), *snapshot.besides.items())
    }
    metadata = parameter_metadata(snapshot.aux, snapshot.besides)
    metadata[_FACTS] = json.dumps({"version": VERSION, **snapshot.facts})
    metadata[_CHECKSUM] = str(_checksum(arrays, metadata[_FACTS]))
    return arrays, metadata


def read_snapshot(path: Path) -> Saved:
    """Read a file of :func:`write_snapshot`.

    Raises:
        FormatError: the file is damaged, is not a run checkpoint, or has another version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    return decode_snapshot(content, path)


def decode_snapshot(content: bytes, path: Path) -> Saved:
    """Return the checkpoint with this content; ``path`` names it. Raises as :func:`read_snapshot`."""
    arrays, metadata = file_format.decode(content, str(path))
    text = metadata.get(_FACTS)
    if not isinstance(text, str):
        raise FormatError(f"{path} holds parameters alone, not a run to go on with: fit(checkpoint=…) writes those")
    try:
        facts = json.loads(text)
        version = facts["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: damaged: its facts are no JSON object with a version ({error!r})") from error
    if version != VERSION:
        raise OtherVersion(
            f"{path} is a checkpoint of version {version!r}; this weftplan reads version {VERSION}: go on with the "
            f"weftplan that wrote it, or begin anew with its parameters (module.load_params)"
        )
    if metadata.get(_CHECKSUM) != str(_checksum(arrays, text)):
        raise FormatError(f"{path}: damaged: its bytes do not fit their checksum")
    other_arrays, aux = named_in(metadata, BESIDES, path), named_in(metadata, "aux", path)
    return Saved(
        path,
        as_arrays(arrays, set(arrays) - other_arrays - aux),
        as_arrays(arrays, aux),
        {name: arrays[name] for name in other_arrays},
        facts,
    )


class OtherVersion(FormatError):
    """Intact checkpoint of another version. It is an error; reading does not fall back to an older file."""


# Guarantees: a file with a checkpoint's name is whole, whenever the process is killed. At most one write is pending,
# so two snapshots are alive at most. A failed write changes no file, and training goes on. A file is pruned only after
# a newer one is whole.
# Fixed: the prefix, ``every`` and ``keep``. Changing: ``_thread``, of the training thread alone; ``failed`` and
# ``_last_written``, written by the thread of a write, and read by the training thread after :meth:`wait`.
class Checkpoints:
    """The checkpoints under one prefix.

    Args:
        prefix: path prefix of the files; the folder is created.
        every: updates between two checkpoints; None: a checkpoint at the end of each epoch.
        keep: number of newest checkpoints to keep; None: all.
        on_event: called on the writing thread with the kind of event and its figures.

    Raises:
        ParameterError: ``every`` or ``keep`` is no whole number above 0.
        OSError: the folder cannot be made or written.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        on_event: Callable[[str, dict[str, object]], None] | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(f"fit: {name} must be a whole number >= 1 or None, got {value!r}")
        self.prefix = Path(os.fsdecode(prefix))
        self.every = every
        self.keep = keep
        self.failed = 0
        """Number of failed writes."""
        self.on_event = on_event
        self.writes = True
        """False if another process with equal weights writes the checkpoints; this process then only reads."""
        self._thread: threading.Thread | None = None
        self._last_written: Path | None = None
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(self.prefix.parent, os.W_OK):
            raise PermissionError(13, "the folder of the checkpoints is write-protected", str(self.prefix.parent))

    @property
    def best(self) -> Path:
        """Path of the best epoch so far."""
        return self.prefix.with_name(f"{self.prefix.name}-best.safetensors")

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after ``step`` updates."""
        return self.prefix.with_name(f"{self.prefix.name}-step{step:08d}.safetensors")

    def files(self) -> list[Path]:
        """Return the existing checkpoint files, oldest first."""
        steps = {}
        for path in self.prefix.parent.glob(f"{_escaped(self.prefix.name)}-step*.safetensors"):
            match = _STEP.search(path.name)
            if match is not None and path.name[: match.start()] == self.prefix.name:
                steps[int(match[1])] = path
        return [steps[step] for step in sorted(steps)]

    def newest(self) -> Saved | None:
        """Read the newest intact checkpoint; damaged files are logged and skipped.

        Raises:
            FormatError: there are checkpoints, but each is damaged, or the newest has another version.
        """
        damaged = []
        for path in reversed(self.files()):
            try:
                return read_snapshot(path)
            except OtherVersion:
                raise
            except FormatError as error:
                damaged.append(str(error))
                log.warning("%s; the one before it is tried", error)
        if damaged:
            raise FormatError(f"no checkpoint under {self.prefix} can be read: {damaged[0]}; remove them to begin anew")
        return None

    def sweep(self) -> None:
        """Remove temporary files of a process that was killed during a write."""
        # weftplan.support.atomic_files names temporary files: a dot, the first 40 characters of the target's name, a
        # dot and eight hexadecimal digits.
        beginnings = tuple(f".{self.prefix.name}-{kind}"[:41] for kind in ("step", "best"))
        for path in self.prefix.parent.glob(".*"):
            if path.name.startswith(beginnings) and re.search(r"\.[0-9a-f]{8}$", path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def save(self, path: Path, snapshot: CheckpointSnapshot) -> None:
        """Start writing ``snapshot`` on a thread; first waits for the previous write, so that memory stays bounded.

        A failed write is logged, and existing files stay.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(path, snapshot), name="weftplan checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the pending write has finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, path: Path, snapshot: CheckpointSnapshot) -> None:
        start = time.perf_counter()
        try:
            nbytes = write_snapshot(path, snapshot)
        except Exception as error:  # a disk error, or a failed operation, which also raises on the training thread
            self.failed += 1
            previous = self._last_written or next(iter(reversed(self.files())), None)
            why = getattr(error, "strerror", None) or error
            log.warning(
                "the checkpoint %s was not written: %s; training goes on, and %s",
                *(path, why, f"the last good one is {previous}" if previous else "there is no other one"),
            )
            self._tell("checkpoint failed", {"step": snapshot.facts.get("step", 0), "path": str(path), "why": str(why)})
            return
        seconds = time.perf_counter() - start
        if path != self.best:
            self._last_written = path
            self._prune()
        figures = {"path": str(path), "bytes": nbytes, "seconds": round(seconds, 4)}
        self._tell("checkpoint", {"step": snapshot.facts.get("step", 0), **figures})

    def _prune(self) -> None:
        if self.keep is not None:
            for path in self.files()[: -self.keep]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _tell(self, kind: str, figures: dict[str, object]) -> None:
        if self.on_event is not None:
            self.on_event(kind, figures)


def _checksum(arrays: Mapping[str, RawArray], facts: str) -> int:
    """Return the CRC-32 of the facts and the bytes of all arrays in the order of their names."""
    total = zlib.crc32(facts.encode())
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(values.data.cast("B") if values.size else b"", total)
    return total


def _escaped(name: str) -> str:
    """Escape the characters that ``glob`` interprets."""
    return re.sub(r"([*?[])", r"[\1]", name)


def make_checkpoints(
    prefix: str | os.PathLike[str] | None,
    every: int | None,
    keep: int | None,
    resume: bool | str,
    *,
    joins: bool = False,
) -> Checkpoints | None:
    """Make the checkpoints that the arguments of ``fit`` request; None without a prefix.

    Args:
        joins: this process joins a run whose checkpoints other processes write now.

    Raises:
        ParameterError: the arguments contradict each other; or checkpoints of an earlier run exist without ``resume``.
    """
    if resume not in (False, True, "changed"):
        raise ParameterError(f"fit: resume must be True, False or 'changed', got {resume!r}")
    if prefix is None:
        if resume or every is not None:
            raise ParameterError(f"fit: {'resume' if resume else 'every'} needs checkpoint=prefix, where they are")
        return None
    checkpoints = Checkpoints(prefix, every=every, keep=keep)
    if joins:
        return checkpoints
    old = checkpoints.files()
    if old and not resume:
        raise ParameterError(
            f"fit: there are checkpoints of an earlier run, the newest {old[-1]}: pass resume=True to go on from it, "
            f"remove them, or choose another prefix"
        )
    checkpoints.sweep()
    return checkpoints
