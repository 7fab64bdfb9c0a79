"""The report folder of ``weftplan train --report``: training curves, the plan, the recorded run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftplan.planner import MemoryPlan
from weftplan.support.atomic_files import write_text
from weftplan.training.fit.events import NAME, Events

_LINKS = (
    ("the plan of one device, to explore", "plan.html"),
    ("the plan as a picture", "memory-plan.svg"),
    ("the workers in the last epoch, lane by lane", "lanes.html"),
    ("the figures", "result.json"),
    ("the events", NAME),
)


def write_report(
    folder: Path,
    network: str,
    plan: MemoryPlan,
    events: Events,
    lanes: str,
    result: Mapping[str, Any],
    rows: Sequence[tuple[str, str]],
) -> None:
    """Write ``index.html`` and the files that it links to.

    Args:
        plan: the plan of one device.
        events: events of the run, in the same folder.
        lanes: the page of recorded operations.
        result: figures of the run, which go to ``result.json``.
        rows: the figures in words.
    """
    plan.plot(folder / "memory-plan.svg", title=f"{network}: memory plan")
    write_text(folder / "plan.html", plan.to_html(title=f"training {network}, one device"))
    write_text(folder / "lanes.html", lanes)
    write_text(folder / "result.json", json.dumps(result, indent=2) + "\n")
    facts = [(name.strip(), value) for name, value in rows]
    facts.append(("devices", ", ".join(result["devices"])))
    events.write_page(title=f"Training {network}", facts=facts, links=_LINKS)
