"""The figures of speed in docs/comparison.md: their file, and the tables made from them.

``data/figures.json`` has one record for each run of ``refresh.py``: date, processor, load of the machine, and figures
by table, row and column. A cell shows the range over the processors, with the latest figure of each.
Standard library only, because ``docs/refresh.py`` imports this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

DATA = Path(__file__).parent / "data" / "figures.json"
BEGIN, END = "<!-- speed: python bench/refresh.py -->", "<!-- end of speed -->"
"""Lines of docs/comparison.md around its tables of speed."""
Figures = dict[str, dict[str, dict[str, float]]]
"""Table -> row -> column -> figure."""


class Run(TypedDict):
    """One run of ``refresh.py``."""

    date: str
    processor: str
    load: float | None
    """Mean number of running threads in the minute before the run; None: unknown."""
    figures: Figures


@dataclass(frozen=True)
class Table:
    """One table, with the command that measures each row."""

    key: str
    title: str
    columns: tuple[str, ...]
    command: str
    """Command that measures a row; ``{}`` stands for the options of the row."""
    options: tuple[tuple[str, str], ...] = ()
    """Pairs of a text in a row's label and the options that measure this row alone."""

    def command_of(self, row: str) -> str:
        """Return the command that measures a row."""
        return self.command.format(next((chosen for text, chosen in self.options if text in row), ""))


NETWORKS = {
    "mlp": "MLP",
    "lenet": "LeNet",
    "resnet18": "ResNet-18, 32x32",
    "resnet18_224": "ResNet-18, 224x224",
    "mobilenet": "MobileNet",
    "lstm": "LSTM",
}
TABLES = (
    Table(
        "engine",
        "engine, an empty Python function, push to done",
        ("independent", "chain", "diamond", "push and wait"),
        "python bench/bench_engine.py{} --mxnet-python PATH",
        (("apart", " --placement apart"), ("together", " --placement together")),
    ),
    Table(
        "tasks",
        "task, weftplan / `ThreadPoolExecutor`",
        ("empty", "three arrays", "20 µs", "50 µs", "stencil 256²", "stencil 1024²"),
        "python bench/bench_tasks.py",
    ),
    Table(
        "training",
        "training step, weftplan / MXNet 1.9.1",
        tuple(NETWORKS.values()),
        "python bench/bench_training.py{} --mxnet-python PATH",
        (("one thread", " --threads 1"), ("two threads", " --threads 2")),
    ),
    Table(
        "store",
        "store `device`, four contexts, MXNet 1.9.1 / weftplan",
        ("push and pull of 10,000 floats", "of 1,000,000"),
        "python bench/bench_kvstore.py --mxnet-python PATH",
    ),
)


def load() -> list[Run]:
    """Return all recorded runs, the oldest first."""
    runs: list[Run] = json.loads(DATA.read_text(encoding="utf-8"))
    return runs


def save(runs: list[Run]) -> None:
    """Write all runs to the data file."""
    DATA.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def filled(text: str) -> str:
    """Return the page's text with fresh tables between the two marks.

    Raises:
        ValueError: the text does not contain each mark exactly once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r} once each; put them around the tables of speed")
    before, remaining = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(load())}\n{END}{remaining.split(END)[1]}"


def markdown(runs: list[Run]) -> str:
    """Return the page's tables; the number after a row's label refers to the command below the table."""
    return "\n".join(_table(table, runs) for table in TABLES if any(table.key in run["figures"] for run in runs))


def _table(table: Table, runs: list[Run]) -> str:
    rows = dict.fromkeys(row for run in runs for row in run["figures"].get(table.key, {}))
    commands = list(dict.fromkeys(map(table.command_of, rows)))
    lines = [f"| {table.title} | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    for row in rows:
        cells = []
        for column in table.columns:
            latest: dict[str, float] = {}
            for run in runs:
                figure = run["figures"].get(table.key, {}).get(row, {}).get(column)
                if figure is not None:
                    latest[run["processor"]] = figure
            cells.append(_range(list(latest.values())))
        lines.append(f"| {row} ({commands.index(table.command_of(row)) + 1}) | {' | '.join(cells)} |")
    sources = {run["processor"]: run for run in runs if table.key in run["figures"]}
    notes = [f"({number}) `{command}`  " for number, command in enumerate(commands, 1)]
    return "\n".join([*lines, "", *notes, f"{'; '.join(map(_source, sources.values()))}.", ""])


def _source(run: Run) -> str:
    """Return the processor, the date, and the load if it was more than a core's.

    >>> _source({"date": "2026-11-28", "processor": "EPYC", "load": 3.0, "figures": {}})
    'EPYC, 2026-11-28, loaded'
    """
    loaded = run["load"] is not None and run["load"] > 1
    return f"{run['processor']}, {run['date']}{', loaded' if loaded else ''}"


def _range(figures: list[float]) -> str:
    """Return the least and the largest figure as text, with two decimals below 1.5 and one above.

    >>> _range([1.91, 1.54]), _range([0.804, 0.8]), _range([])
    ('1.5 to 1.9', '0.80', '')
    """
    texts = list(dict.fromkeys(f"{figure:.2f}" if figure < 1.5 else f"{figure:.1f}" for figure in sorted(figures)))
    return " to ".join(texts if len(texts) < 2 else (texts[0], texts[-1]))
