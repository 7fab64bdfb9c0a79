"""Draw the four states of a var of weftplan/engine/var.py, and the events that change them.

python docs/draw_states.py            # images/var-states.svg
"""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "images" / "var-states.svg"
WIDTH, HEIGHT, BOX_WIDTH, BOX_HEIGHT = 900, 430, 190, 64
STATES = {
    "IDLE": (60, 60, "no reader, no write"),
    "READING": (650, 60, "n readers"),
    "DRAINING": (650, 310, "n readers, a write waits"),
    "WRITING": (60, 310, "one write runs"),
}
"""Each state's box (left and upper edge) and its condition."""
ARROWS = {
    ("IDLE", "READING"): ((250, 80, 650, 80), "a read is pushed: granted at once", (450, 68, "middle")),
    ("READING", "IDLE"): ((650, 108, 250, 108), "the last reader finishes", (450, 128, "middle")),
    ("READING", "DRAINING"): ((760, 124, 760, 310), "a write is pushed: it waits", (748, 262, "end")),
    ("DRAINING", "WRITING"): (
        (650, 342, 250, 342),
        "the last reader finishes: the write is granted",
        (450, 362, "middle"),
    ),
    ("IDLE", "WRITING"): ((110, 124, 110, 310), "a write is pushed", (120, 240, "start")),
    ("WRITING", "IDLE"): ((80, 310, 80, 124), "the write finishes", (72, 220, "end")),
    ("WRITING", "READING"): (
        (240, 310, 660, 124),
        "the write finishes, reads follow: all are granted",
        (455, 200, "middle"),
    ),
    ("WRITING", "DRAINING"): (
        (250, 322, 650, 322),
        "the write finishes, reads and then a write follow",
        (450, 312, "middle"),
    ),
}
"""Each change of state: its arrow (x, y, x, y), its cause, and the position of that text (x, y, alignment)."""
NOTE = "A state does not change if READING gets or loses one of several readers, or if a write follows a write."


def drawing() -> str:
    """Return the picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-90 30 {WIDTH + 60} {HEIGHT - 10}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        "<title>The four states of a var</title>",
        '<rect x="-90" y="30" width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#37474f"/></marker></defs>',
    ]
    for (x1, y1, x2, y2), _, _ in ARROWS.values():
        lines.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#37474f" stroke-width="1.5" marker-end="url(#head)"/>')
    for _, text, (x, y, anchor) in ARROWS.values():
        lines.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#37474f" stroke="#ffffff" stroke-width="5" '
            f'paint-order="stroke">{escape(text)}</text>'
        )
    lines.append(f'<text x="60" y="408" fill="#37474f">{escape(NOTE)}</text>')
    for name, (x, y, text) in STATES.items():
        lines.append(
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="10" fill="#e3f2fd" '
            'stroke="#1565c0" stroke-width="2"/>'
        )
        middle = x + BOX_WIDTH // 2
        lines.append(f'<text x="{middle}" y="{y + 27}" text-anchor="middle" font-weight="600">{name}</text>')
        lines.append(f'<text x="{middle}" y="{y + 48}" text-anchor="middle" fill="#37474f">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
