"""Fixtures of tests that compile steps of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def fresh_compiler(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache of measurements, an empty compiler cache and one thread."""
    import torch

    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
