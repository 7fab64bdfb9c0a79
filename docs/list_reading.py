"""Write the reading lists and their lengths on the page for lecturers.

``python docs/refresh.py`` calls this. A list names the files of a folder that explain its idea, and leaves out the
rest.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "teaching.md"
READING = {
    "engine": "var operation region workers threaded core execution failure waiting",
    "planner": "program storage_assignment match_range liveness buffers slabs memory_plan",
    "kvstore": "base local fixed_order_sums updating updater on_device",
}
"""The files of each folder, in reading order."""
BEGIN, END = "<!-- reading: python docs/refresh.py -->", "<!-- end of reading -->"


def files(room: str) -> list[tuple[Path, int]]:
    """Return (path, number of lines) of each file of a reading list."""
    paths = [ROOT / "weftplan" / room / f"{name}.py" for name in READING[room].split()]
    return [(path, len(path.read_text(encoding="utf-8").splitlines())) for path in paths]


def table() -> str:
    """Return the reading lists as a Markdown table."""
    rows = ["| room | files to read, in this order | lines |", "|---|---|---|"]
    for room in READING:
        listed = files(room)
        names = ", ".join(f"[{path.name}](../{path.relative_to(ROOT).as_posix()}) {lines}" for path, lines in listed)
        rows.append(f"| [{room}](../weftplan/{room}/README.md) | {names} | {sum(lines for _, lines in listed):,} |")
    return "\n".join([BEGIN, "", *rows, "", END])


def page() -> str:
    """Return the text of the page for lecturers with current reading lists."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return head + table() + rest.partition(END)[2]
