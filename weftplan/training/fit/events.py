"""Training events of ``fit``: a JSON Lines log, ``events.jsonl``, and a summary page.

Each line is an event: ``begin``, ``step`` (the figures since the last line), ``epoch``, ``checkpoint``, ``warning``,
``resume``, ``end``. The file is append-only. A killed process leaves at most one incomplete line, which readers ignore.
In the first minutes nearly every step has a line; later there is one line per second, so a night takes a few megabytes.

Only the training thread writes. Other threads append to a deque (an atomic operation), and the next write drains it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from weftplan import engine, storage
from weftplan import ndarray as nd
from weftplan.device import host_memory
from weftplan.device.context import Context
from weftplan.device.usage import Usage
from weftplan.errors import FormatError, MXNetError, ParameterError
from weftplan.support import slots
from weftplan.support.atomic_files import open_to_read, write_text
from weftplan.support.package_log import log
from weftplan.training.fit.fit_module import FitModule, optimizer_of

Pairs = Sequence[tuple[str, float]]
Event = dict[str, Any]

NAME = "events.jsonl"
PAGE = "index.html"
PHASES = ("data", "compute", "exchange", "other")
"""Phases of the training thread's time.

- ``data``: waiting for the next batch while the devices are idle.
- ``compute``: pushing forward and backward, and waiting for outputs.
- ``exchange``: exchanging gradients and updating; the only waits are for other processes.
- ``other``: callbacks, checkpoints and all remaining work.
"""
_SHARE = 0.005
"""Interval between two lines as a fraction of the elapsed time; ``period`` seconds is the upper limit."""


class Window:
    """Accumulated figures of consecutive steps: seconds by phase, number of steps and samples."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = 0
        self.samples = 0

    def spent(self, phase: str, since: float) -> float:
        """Add the time since ``since`` to a phase; returns the current time."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - since
        return now_s

    @property
    def total(self) -> float:
        """Total seconds of all phases."""
        return sum(self.seconds.values())


class StepEnd:
    """Timestamp of the moment when the devices finish a step, recorded without waiting.

    It pushes an operation that reads the first and the last parameter, so the operation runs after their updates.
    """

    def __init__(self, module: FitModule) -> None:
        self.at: float | None = None
        """Time of completion, None before; written by an engine worker, read by the training thread."""
        try:
            parameters = module.owner().group.param_arrays
        except MXNetError:  # a custom module without access to its parameters
            return
        arrays = {id(array): array for parts in (*parameters[:1], *parameters[-1:]) for array in parts}
        reads = tuple({id(array.var): array.var for array in arrays.values()}.values())
        if reads:
            engine.get().push(self._note, reads, name="end of step")

    def _note(self) -> None:
        self.at = time.perf_counter()


class Events:
    """Writer of ``events.jsonl`` and a self-contained page, ``index.html``.

    Args:
        folder: target folder, created if missing. A resumed run appends to existing events; any other run overwrites
            them.
        period: most seconds between two lines of figures.
        gradients: whether to compute the norm of the gradients for each line: the L2 norm of the first device's
            gradients, times the optimizer's ``rescale_grad``.
        page: whether to write the page, at the end of epochs (at most every ten seconds) and of the run.
        tensorboard: a folder for TensorBoard, which needs the package tensorboardX (the extra ``tensorboard``), or a
            writer with ``add_scalar(name, value, step)``, such as that of ``torch.utils.tensorboard``.

    Raises:
        MXNetError: tensorboardX is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        period: float = 1.0,
        gradients: bool = True,
        page: bool = True,
        tensorboard: Any = None,
    ) -> None:
        if not period >= 0:
            raise ParameterError(f"Events: period must be >= 0 seconds, got {period!r}")
        self.folder = Path(folder)
        self.period = period
        self.gradients = gradients
        self.page = page
        self.title = "training"
        self._writer = _writer(tensorboard)
        self._closes_writer = self._writer is not None and self._writer is not tensorboard
        self._file: TextIO | None = None
        self._sent: deque[Event] = deque()
        self._start = time.perf_counter()
        self._line_at = 0.0
        self._page_at = -math.inf
        self._full = False
        """Whether a write has failed."""
        self._contexts: list[Context] = []
        self._usage = Usage(())

    # -- what fit tells -------------------------------------------------------------------------------------------

    def begin(self, contexts: Sequence[Context], facts: Mapping[str, object], *, resumed: bool) -> None:
        """Start or resume a run: open the file and write its first event."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / NAME
        torn = resumed and path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = open(path, "a" if resumed else "w", encoding="utf-8")  # noqa: SIM115 - it stays open
        if torn:  # incomplete line of a killed process
            self._file.write("\n")
        self._contexts = list(contexts)
        self._usage = Usage(contexts)
        self._start, self._line_at = time.perf_counter(), 0.0
        self._write("resume" if resumed else "begin", facts)

    def tell(self, kind: str, facts: Mapping[str, object]) -> None:
        """Record an event from any thread; it is written with the next line."""
        self._sent.append({"event": kind, "time": round(time.time(), 3), **facts})

    def is_due(self) -> bool:
        """Return whether the step that has just ended gets a line."""
        elapsed = time.perf_counter() - self._start
        return elapsed - self._line_at >= min(self.period, _SHARE * elapsed)

    def step(self, step: int, epoch: int, batch: int, metrics: Pairs, window: Window, module: FitModule) -> Event:
        """Write a line of figures; ``window`` covers the steps since the previous line."""
        fields: Event = {
            "step": step,
            "epoch": epoch,
            "batch": batch,
            "steps": window.steps,
            "seconds": {phase: round(value, 6) for phase, value in window.seconds.items()},
            "samples_per_s": round(window.samples / max(window.total, 1e-9), 3),
            "metrics": dict(metrics),
            **self._machine(),
            **_optimizer_figures(module),
        }
        if self.gradients:
            fields["gradient_norm"] = gradient_norm(module)
        event = self._write("step", fields)
        self._line_at = time.perf_counter() - self._start
        self._scalars("train/", dict(metrics), step)
        names = ("samples_per_s", "gradient_norm", "learning_rate", "loss_scale", "live", "reserved", "cpu")
        self._scalars("run/", {name: fields[name] for name in names if fields.get(name) is not None}, step)
        self._scalars("seconds/", window.seconds, step)
        return event

    def epoch(self, step: int, epoch: int, train: Pairs, validation: Pairs, seconds: float) -> None:
        """Write an epoch's event, and the page if it is older than ten seconds."""
        facts = {"step": step, "epoch": epoch, "train": dict(train), "validation": dict(validation)}
        self._write("epoch", {**facts, "seconds": round(seconds, 4)})
        self._scalars("epoch/train/", dict(train), step)
        self._scalars("epoch/validation/", dict(validation), step)
        if self.page and time.perf_counter() - self._page_at > 10:
            self._try_page()

    def end(self, facts: Mapping[str, object]) -> None:
        """Finish the run, also after an error: write the last event and the page, close the files."""
        if self._file is None:
            return
        self._write("end", facts)
        file, self._file = self._file, None
        with suppress(OSError):  # a full disk, already logged
            file.close()
        if self.page:
            self._try_page()
        if self._closes_writer:
            self._writer.close()

    def write_page(self, **settings: object) -> Path:
        """Write the page of all events so far; ``settings`` are passed to the page renderer."""
        path = self.folder / PAGE
        text = slots.TRAINING_PAGE.get()(read_events(self.folder / NAME), **{"title": self.title, **settings})
        write_text(path, text)
        self._page_at = time.perf_counter()
        return path

    # -- how ------------------------------------------------------------------------------------------------------

    def _try_page(self) -> None:
        try:
            self.write_page()
        except OSError as error:
            self._say_full(error)

    def _say_full(self, error: OSError) -> None:
        """Log, once, that events can no longer be written; training continues without them."""
        if not self._full:
            reason = error.strerror or error
            log.warning("events are no longer written to %s: %s; training goes on", self.folder, reason)
        self._full = True

    def _write(self, kind: str, facts: Mapping[str, object]) -> Event:
        assert self._file is not None
        event = {"event": kind, "time": round(time.time(), 3), **facts}
        events = [self._sent.popleft() for _ in range(len(self._sent))]
        lines = "".join(map(_line, (*events, event)))
        if not self._full:
            try:
                self._file.write(lines)
                self._file.flush()
            except OSError as error:
                self._say_full(error)
        return event

    def _machine(self) -> Event:
        """Return current memory and queue figures, and the processor load since the last line."""
        statistics = [storage.get(context).statistics() for context in self._contexts]
        told = engine.get().statistics()
        queues: dict[str, int] = {}
        for queue in told.queues:
            name = f"{queue.context or 'any CPU'} {queue.queue}"
            queues[name] = queues.get(name, 0) + queue.depth
        return {
            "live": sum(figures.requested_bytes for figures in statistics),
            "reserved": sum(figures.reserved_bytes for figures in statistics),
            "process": host_memory.resident(),
            "pending": told.pending,
            "queues": queues,
            **self._usage.figures(),
        }

    def _scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{prefix}{name}", float(value), step)


def gradient_norm(module: FitModule) -> float | None:
    """Return the gradient norm of the last update, as defined by :class:`Events`; waits for the gradients."""
    gradients = [grads[0] for grads in module.owner().group.grad_arrays if grads is not None]
    if not gradients:
        return None
    squares = nd.multi_sum_sq(*gradients, num_arrays=len(gradients)).asnumpy()
    rescale = float(optimizer_of(module.owner()).rescale_grad) / float(getattr(module, "loss_scale", None) or 1.0)
    return math.sqrt(float(squares.astype("float64").sum())) * abs(rescale)


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Read the events of a file, without an incomplete last line and without steps that a resumed run has repeated.

    Raises:
        FormatError: a line is not an event.
    """
    events: list[Event] = []
    with open_to_read(path) as file:
        lines = file.read().decode().splitlines()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            following = next((line for line in lines[number + 1 :] if line.strip()), None)
            if following is None or '"event": "resume"' in following:
                continue  # the process was killed while it wrote this line
            raise FormatError(f"{os.fspath(path)}: line {number + 1} is no event: {line[:80]!r}") from error
        if kind == "resume":
            events = [earlier for earlier in events if earlier.get("step", 0) <= event.get("step", 0)]
        events.append(event)
    return events


def _optimizer_figures(module: FitModule) -> Event:
    figures: Event = {"learning_rate": float(optimizer_of(module.owner()).learning_rate)}
    scale = getattr(module, "loss_scale", None)
    return figures if scale is None else {**figures, "loss_scale": float(scale)}


def _line(event: Event) -> str:
    return json.dumps(_plain(event)) + "\n"


def _plain(value: object) -> object:
    """Convert a value to plain JSON; nan, inf and -inf become texts."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    try:
        convertible: Any = value
        number = float(convertible)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)


def _writer(tensorboard: Any) -> Any:
    if tensorboard is None or hasattr(tensorboard, "add_scalar"):
        return tensorboard
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MXNetError(
            "Events(tensorboard=…) needs the package tensorboardX: pip install 'weftplan[tensorboard]'"
        ) from error
    return SummaryWriter(os.fspath(tensorboard))
