"""The page of a training run: complete, self-contained, and true to the events."""

import json
import re

from weftplan.report.training_html import POINT_LIMIT, story, training_html


def step(number, **facts):
    """Return an event of a training step with these changed fields."""
    return {
        "event": "step",
        "step": number,
        "epoch": 0,
        "batch": number - 1,
        "steps": 1,
        "seconds": {"data": 0.25, "compute": 0.5, "exchange": 0.05, "other": 0.2},
        "samples_per_s": 100.0,
        "metrics": {"accuracy": 0.5},
        "live": 1000,
        "reserved": 2000,
        "process": 3000,
        "pending": 3,
        "queues": {"cpu(0) worker": 2, "cpu(0) copies": 0},
        "learning_rate": 0.1,
        "gradient_norm": 2.0,
        **facts,
    }


def page_data(events, **settings):
    """Return (data of the charts, page)."""
    page = training_html(events, **settings)
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text.replace("<\\/", "</")), page


def test_what_is_drawn():
    """The page has a chart each for metrics, phases, speed, memory, gradients, learning rate and queues."""
    epoch = {"event": "epoch", "step": 2, "epoch": 0, "train": {"accuracy": 0.5}, "seconds": 1.0}
    data, page = page_data([step(1), step(2), {**epoch, "validation": {"accuracy": 0.4}}])
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert list(charts) == [
        "accuracy",
        "where a step spends its time",
        "samples a second",
        "memory",
        "norm of the gradients",
        "learning rate",
        "depth of the engine's queues",
    ]
    assert charts["accuracy"]["lines"][1]["points"] == [[2, 0.4]]
    memory = {line["name"]: line["points"][0] for line in charts["memory"]["lines"]}
    assert memory == {"live": [1, 1000], "reserved by pools": [1, 2000], "process": [1, 3000]}
    assert [line["name"] for line in charts["depth of the engine's queues"]["lines"]] == [
        "all operations that are pending",
        "ready in cpu(0) worker",
    ]
    assert not re.search(r"(src|href)\s*=\s*[\"']?https?:", page)


def test_the_story():
    """The summary states steps, epochs, shares of the time and the number of checkpoints."""
    events = [step(1), step(2), {"event": "checkpoint", "step": 2, "path": "a", "bytes": 5, "seconds": 0.1}]
    text = story(events)
    assert text.startswith("2 steps, 0 whole epochs, 2.0 s: 25 % waiting for data, 50 % computing, 5 % exchanging")
    assert "1 checkpoints written" in text


def test_long_runs_are_thinned_out_and_keep_their_last_step():
    """A chart of 40,000 steps has a bounded number of points, including the last step."""
    data, page = page_data([step(number) for number in range(1, 40_001)])
    points = data["charts"][0]["lines"][0]["points"]
    assert len(points) <= POINT_LIMIT + 1
    assert points[-1][0] == 40_000
    assert len(page) < 2_000_000


def test_what_is_no_number_is_a_gap():
    """NaN and infinity are gaps in a line."""
    data, _ = page_data([step(1, metrics={"loss": "nan"}, gradient_norm="inf"), step(2, metrics={"loss": 3.0})])
    assert data["charts"][0]["lines"][0]["points"] == [[1, None], [2, 3.0]]


def test_texts_cannot_end_the_script():
    """Markup in warnings, titles, facts and links is escaped."""
    nasty = "</script><script>alert(1)</script>"
    data, page = page_data(
        [step(1), {"event": "warning", "step": 1, "text": nasty}],
        title=nasty,
        facts=[(nasty, nasty)],
        links=[(nasty, nasty)],
    )
    assert data["log"] == [["warning", 1, nasty]]
    assert data["marks"][0]["kind"] == "warning"
    assert page.count("</script>") == 2  # the page's own two scripts
    assert page.count("&lt;script&gt;") == 6


def test_nothing_has_run():
    """A page without a step says that no step was recorded."""
    _, page = page_data([{"event": "begin", "step": 0}])
    assert "No step has been recorded yet." in page
