"""The roofline picture of bench_kernels.py: every pass of every layer below the two limits of the machine.

The processor's arithmetic limits a pass, and so does the memory that delivers the bytes which the pass must read and
write once. The first limit is the best rate of NumPy's product of 1024 x 1024 matrices, the second the rate of copying
large arrays; both are measured in the same run. Layers that stay in a cache from one repetition to the next may exceed
the second, and Winograd's algorithm the first. This file only draws; it measures nothing.
"""

import math
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 60
COLOURS = {"lenet": "#b8860b", "resnet18_32": "#1f5fa8", "resnet18_224": "#2a8c55", "mobilenet_224": "#b03a6a"}
MARKS = {"forward": "circle", "data": "square", "weight": "diamond"}
NOTE = (
    "Above the roof: 3 x 3 layers",
    "by Winograd's algorithm. It",
    "multiplies less often than",
    "the operations counted here.",
)
"""Why points can lie above the arithmetic limit."""


class Pass(NamedTuple):
    """One pass of one layer, with its measured seconds."""

    network: str
    layer: str
    kind: str
    """``forward``, ``data`` or ``weight``."""
    flops: float
    nbytes: float
    """Fewest bytes that the pass can read and write."""
    seconds: float

    @property
    def intensity(self):
        """Floating-point operations per byte."""
        return self.flops / self.nbytes

    @property
    def rate(self):
        """Floating-point operations per second."""
        return self.flops / self.seconds

    def share(self, peak, bandwidth):
        """Return the rate divided by the lower of its two limits: ``peak``, and ``bandwidth`` times the intensity."""
        return self.rate / min(peak, self.intensity * bandwidth)


def draw(passes, peak, bandwidth, title):
    """Return the SVG as text; ``peak`` in operations per second, ``bandwidth`` in bytes per second."""
    low_x, high_x = _decades([one.intensity for one in passes] + [peak / bandwidth])
    low_y, high_y = _decades([one.rate for one in passes] + [peak])

    def x(value):
        return LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y(value):
        return HEIGHT - BOTTOM - (math.log10(value) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=14),
    ]
    for exponent in range(low_x, high_x + 1):
        at = x(10.0**exponent)
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM, "#ddd"))
        parts.append(_text(at, HEIGHT - BOTTOM + 18, f"{10.0**exponent:g}", anchor="middle"))
    for exponent in range(low_y, high_y + 1):
        at = y(10.0**exponent)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#ddd"))
        parts.append(_text(LEFT - 8, at + 4, f"{10.0 ** (exponent - 9):g}", anchor="end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 18, "operations for each byte that has to be moved", anchor="middle"))
    parts.append(_text(LEFT, TOP - 4, "GFLOP/s"))
    ridge, first = peak / bandwidth, max(10.0**low_x, 10.0**low_y / bandwidth)
    parts.append(_line(x(first), y(first * bandwidth), x(ridge), y(peak), "#444", 2))
    parts.append(_line(x(ridge), y(peak), x(10.0**high_x), y(peak), "#444", 2))
    parts.append(_text(x(ridge) + 6, y(peak) - 6, f"sgemm {peak / 1e9:.0f} GFLOP/s"))
    parts.append(_text(x(first) + 24, y(first * bandwidth) + 2, f"copy {bandwidth / 1e9:.1f} GB/s"))
    for one in passes:
        mark = _mark(MARKS[one.kind], x(one.intensity), y(one.rate), COLOURS.get(one.network, "#666"))
        share = f"{one.share(peak, bandwidth):.0%} of the roof"
        label = f"{one.network} {one.layer} {one.kind}: {one.rate / 1e9:.0f} GFLOP/s, {share}"
        parts.append(f"<g>{mark}<title>{escape(label)}</title></g>")
    top = TOP + 40
    for number, network in enumerate(dict.fromkeys(one.network for one in passes)):
        parts.append(_mark("circle", WIDTH - RIGHT + 16, top + 20 * number - 4, COLOURS.get(network, "#666")))
        parts.append(_text(WIDTH - RIGHT + 28, top + 20 * number, network))
    for number, (kind, shape) in enumerate(MARKS.items()):
        at = top + 110 + 20 * number
        parts.append(_mark(shape, WIDTH - RIGHT + 16, at - 4, "#666"))
        parts.append(_text(WIDTH - RIGHT + 28, at, "forward" if kind == "forward" else f"gradient of {kind}"))
    for number, line in enumerate(NOTE):
        parts.append(_text(WIDTH - RIGHT + 12, top + 200 + 16 * number, line))
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(passes, peak, bandwidth):
    """Return a Markdown table with a row per layer: each pass's GFLOP/s, and its share of the lower of its limits."""
    rows = {}
    for one in passes:
        cell = f"{one.rate / 1e9:.0f} ({one.share(peak, bandwidth):.0%})"
        rows.setdefault((one.network, one.layer), {})[one.kind] = cell
    lines = ["| network | layer | forward | gradient of data | gradient of weight |", "|---|---|---|---|---|"]
    for (network, layer), cells in rows.items():
        lines.append(f"| {network} | {layer} | " + " | ".join(cells.get(kind, "-") for kind in MARKS) + " |")
    return "\n".join(lines)


def _decades(values):
    """Return the exponents of the powers of ten below and above all values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)


def _line(x1, y1, x2, y2, colour, width=1):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(x, y, text, anchor="start", size=12):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222">{escape(text)}</text>'


def _mark(shape, x, y, colour):
    style = f'fill="{colour}" fill-opacity="0.65" stroke="{colour}"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    if shape == "square":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {style}/>'
    points = f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f} {x - 5:.1f},{y:.1f}"
    return f'<polygon points="{points}" {style}/>'
