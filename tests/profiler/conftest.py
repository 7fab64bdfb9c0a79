"""Engines of each kind with an empty profiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftplan import engine, profiler
from weftplan.profiler.recorder import recorder


@pytest.fixture(autouse=True)
def nothing_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no trace when the test process exits, whatever file a test has named."""
    monkeypatch.setattr(profiler._recording, "named_by", 0)


@pytest.fixture(params=["ThreadedEnginePerDevice", "ThreadedEngine", "NaiveEngine", "Simulator"])
def driver(request: pytest.FixtureRequest, tmp_path: Path):
    """Yield an engine of each kind; the profiler is stopped and empty, and writes to ``tmp_path / "trace.json"``."""
    before_config, result = dict(profiler._config), engine.create(request.param)
    before = engine.set_engine(result)
    recorder.clear()
    profiler.set_config(filename=tmp_path / "trace.json")
    yield result
    try:
        profiler.set_state("stop")
    finally:
        profiler._config.update(before_config)
        recorder.clear()
        engine.set_engine(before)
        result.stop()
