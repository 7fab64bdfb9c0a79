"""Pages of HTML that need no network: a template of this folder, with the head that they share and its marks filled.

Any thread may call it; nothing is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_FOLDER = resources.files("weftplan.report")


def filled(name: str, data: Any, marks: Mapping[str, str]) -> str:
    """The template ``name`` with ``@HEAD@``, ``@DATA@`` and the given marks filled, which are HTML already.

    >>> page = filled("lanes_page.html", {}, {"TITLE": "a run", "STORY": "@TITLE@"})
    >>> page.startswith("<!doctype html>"), page.count("a run"), '<p id="story">@TITLE@</p>' in page
    (True, 2, True)
    """
    # "</" would end the script element that holds the data.
    parts = {"DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"), **marks}
    page = _text(name).replace("@HEAD@\n", _text("page_head.html"), 1)
    # In one pass: a name that looks like a mark stays as it is.
    return re.sub("@(" + "|".join(parts) + ")@", lambda found: parts[found[1]], page)


def _text(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")
