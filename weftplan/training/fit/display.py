"""Progress display of ``fit``: a live terminal line, and a permanent line per epoch.

``fit(progress=True)`` and ``weftplan train`` share it. A file or a pipe receives only the permanent lines. By default
``fit`` shows only the live line, on stderr, once training has taken a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from weftplan.device import host_memory
from weftplan.device.amounts import amount
from weftplan.support.progress import PATIENCE, LiveLine

Pairs = Sequence[tuple[str, float]]
BAR = 20
"""Characters of the bar."""
LEAST_BAR = 4
"""On a narrow terminal the bar is shorter, and with fewer characters left it is omitted: numbers matter more."""


class Display:
    """Progress display of training over ``epochs`` epochs of ``batches`` batches (None: learnt from the first epoch).

    Args:
        memory: function that returns the live bytes.
        stream: output stream; None: stdout, or stderr with ``passing``.
        silent: only count, without output.
        passing: leave no permanent line on a terminal or in a notebook; a pipe gets a line every few seconds.
    """

    def __init__(
        self,
        epochs: int,
        batches: int | None = None,
        *,
        memory: Callable[[], int] | None = None,
        stream: TextIO | None = None,
        silent: bool = False,
        passing: bool = False,
    ) -> None:
        self.epochs = epochs
        self.batches = batches
        self.samples = 0
        self.epoch = 0
        self._memory = memory
        self._stream = (sys.stderr if passing else sys.stdout) if stream is None else stream
        self._silent, self._passing = silent, passing
        self._live = LiveLine(self._stream, patience=PATIENCE if passing else 0.0, lines=passing)
        self._begin(0.0)

    def _begin(self, now_s: float) -> None:
        self._epoch_start = now_s
        self._epoch_samples = 0
        self._seen = 0

    @property
    def stays(self) -> bool:
        """Whether the caller of ``fit`` asked for it, so that its lines stay."""
        return not self._silent and not self._passing

    def batch(self, epoch: int, nbatch: int, samples: int, pairs: Pairs) -> None:
        """Count a batch and update the live line."""
        now_s = time.perf_counter()
        if not self._seen:
            # The start of the first batch is unknown, so neither its time nor its samples count for the speed.
            self._begin(now_s)
        else:
            self._epoch_samples += samples
        self._seen = nbatch + 1
        self.epoch = epoch
        self.samples += samples
        if not self._silent:
            self._live.update(lambda width: self._line(epoch, nbatch + 1, pairs, time.perf_counter(), width))

    def epoch_end(self, epoch: int, train: Pairs, validation: Pairs = (), seconds: float | None = None) -> None:
        """Finish an epoch and write its permanent line."""
        self.batches = self.batches or self._seen
        if self._passing:
            self._begin(time.perf_counter())
            return
        parts = [f"epoch {epoch + 1}/{self.epochs}"]
        parts += [f"{name} {value:.4f}" for name, value in train]
        parts += [f"validation {name} {value:.4f}" for name, value in validation]
        now_s = time.perf_counter()
        if self._epoch_samples:
            parts.append(f"{self._speed(now_s):,.0f} samples/s")
        if seconds is not None:
            parts.append(f"{seconds:.1f} s")
        if not self._silent:
            self.clear()
            self._write("  ".join(parts) + "\n")
        self._begin(now_s)

    def clear(self) -> None:
        """Clear the live line before other output."""
        self._live.clear()

    def _speed(self, now_s: float) -> float:
        return self._epoch_samples / max(now_s - self._epoch_start, 1e-9)

    def _line(self, epoch: int, batches: int, pairs: Pairs, now_s: float, width: int) -> str:
        """Build the live line from as many parts as fit the width, most important first."""
        parts = [f"{name} {value:.4f}" for name, value in pairs]
        head = f"epoch {epoch + 1}/{self.epochs}"
        if self.batches:
            count = f" {batches}/{self.batches}"
            bar_width = width - len(head) - len(count) - len(" []") - (2 + len(parts[0]) if parts else 0)
            bar = min(BAR, bar_width)
            filled = min(bar, bar * batches // self.batches)
            head += (f" [{'#' * filled}{'.' * (bar - filled)}]" if bar >= LEAST_BAR else "") + count
        else:
            head += f" batch {batches}"
        parts.append(f"{self._speed(now_s):,.0f} samples/s")
        if self._memory is not None:
            parts.append(f"live {amount(self._memory())}")
        parts.append(f"process {amount(host_memory.resident())} of {amount(host_memory.memory_info()[1])}")
        for part in parts:
            if len(head) + 2 + len(part) > width:
                break
            head += f"  {part}"
        return head[:width]

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
