"""Runs the checks of a new GPU in order, each with a time limit, and writes a page with their results.

A part, which is one group of checks, runs in its own thread, so that a hanging part can be abandoned. The run stops at
a part that hangs, and at an error after which CUDA answers no call. Parts record their current step and their figures
for the page.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weftplan import __version__, device


class Skip(Exception):
    """Raised by a part that cannot run on this machine; the text is the reason."""


@dataclass
class Result:
    """The result of one part."""

    name: str
    state: str
    """``passed``, ``failed``, ``skipped`` or ``not reached``."""
    seconds: float = 0.0
    at: str = ""
    """The last step that the part has recorded, such as a kernel, an operator or a network."""
    why: str = ""
    notes: list[str] = field(default_factory=list)
    trace: str = ""


class Contact:
    """The input of the parts: contexts and sizes; it records the current step and figures.

    Args:
        context: function that returns the context of a GPU by its number.
        count: number of GPUs.
        small: use small sizes, for the stand-in, which computes with NumPy.
    """

    def __init__(self, context: Callable[[int], Any], count: int, *, small: bool) -> None:
        self.context, self.count, self.small = context, count, small
        self.now = Result("", "failed")

    def at(self, what: str) -> None:
        """Record the step that begins now."""
        self.now.at = what

    def note(self, text: str) -> None:
        """Add a text to the result's notes."""
        self.now.notes.append(text)

    def settle(self) -> None:
        """Wait for the first GPU, so that its errors belong to the current step."""
        device.get(self.context(0)).synchronize()

    def answers(self) -> bool:
        """Return whether CUDA still answers; after some errors every call fails."""
        try:
            for index in range(self.count):
                place = device.get(self.context(index))
                place.synchronize()
                place.memory_info()
        except Exception:
            return False
        return True


@dataclass
class Part:
    """One group of checks."""

    name: str
    limit_s: float
    run: Callable[[Contact], None]


class Report:
    """The results of the parts, and the page with them."""

    def __init__(self, path: Path | None, machine: dict[str, str]) -> None:
        self.path = path
        self.machine = machine
        self.results: list[Result] = []
        self.stopped = ""
        """The reason why no further part is run; empty while parts are still run."""

    def run(self, part: Part, contact: Contact) -> Result:
        """Run a part, unless the run was stopped, rewrite the page, and return the result."""
        result = contact.now = Result(part.name, "not reached", why=self.stopped)
        if not self.stopped:
            self._run(part, contact, result)
        self.results.append(result)
        self.write()
        return result

    def _run(self, part: Part, contact: Contact, result: Result) -> None:
        def body() -> None:
            try:
                part.run(contact)
            except Skip as error:
                result.state, result.why = "skipped", str(error)
            except BaseException as error:
                result.state, result.why = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:600]
                result.trace = traceback.format_exc()
            else:
                result.state = "passed"

        begin = time.perf_counter()
        thread = threading.Thread(target=body, name=f"first contact: {part.name}", daemon=True)
        thread.start()
        thread.join(part.limit_s)
        result.seconds = round(time.perf_counter() - begin, 2)
        if thread.is_alive():
            result.state, result.why = "failed", f"not over after its {part.limit_s:.0f} s"
            self.stopped = f"{part.name} hangs at {result.at or 'its beginning'}"
        elif result.state == "failed" and not contact.answers():
            self.stopped = f"CUDA answers no call since {result.at or part.name}: {result.why[:200]}"

    def write(self) -> None:
        """Write the page as Markdown, and the results as JSON in the same folder."""
        if self.path is None:
            return
        self.path.with_suffix(".md").write_text(self.markdown())
        facts = {"machine": self.machine, "stopped": self.stopped, "parts": [vars(one) for one in self.results]}
        self.path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")

    def markdown(self) -> str:
        """Return the page as Markdown."""
        seconds = sum(one.seconds for one in self.results)
        lines = ["## First contact", ""]
        lines += [f"* {name}: {value}" for name, value in self.machine.items()]
        lines += [f"* {len(self.results)} parts, {seconds:.0f} s", ""]
        if self.stopped:
            lines += [f"**Stopped: {self.stopped}**", ""]
        lines += ["| part | result | seconds | |", "|---|---|---|---|"]
        for one in self.results:
            what = "; ".join(filter(None, [f"at {one.at}" if one.state == "failed" and one.at else "", one.why]))
            what = what or "; ".join(one.notes)
            lines.append(f"| {one.name} | {one.state} | {one.seconds:.1f} | {what.replace('|', '/')} |")
        for one in self.results:
            if one.trace:
                lines += ["", f"`{one.name}`:", "", "```", one.trace.rstrip(), "```"]
        return "\n".join(lines) + "\n"


def machine_of(contact: Contact) -> dict[str, str]:
    """Return the date, the GPUs, and the versions of CUDA, weftplan, CuPy and Python."""
    cupy = device.get(contact.context(0)).xp
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    name = properties["name"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPU": f"{contact.count} x {name.decode() if isinstance(name, bytes) else name}",
        "CUDA": f"runtime {cupy.cuda.runtime.runtimeGetVersion()}, driver {cupy.cuda.runtime.driverGetVersion()}",
        "versions": f"weftplan {__version__}, CuPy {cupy.__version__}, Python {platform.python_version()}",
    }


def raise_outcome(result: Result) -> None:
    """Skip or fail the running pytest test if the part was skipped or failed."""
    if result.state in ("skipped", "not reached"):
        pytest.skip(result.why)
    if result.state == "failed":
        pytest.fail(f"{result.name}, at {result.at or 'its beginning'}: {result.why}\n{result.trace}", pytrace=False)
