"""Self-contained HTML pages: a template of this folder with a shared head and filled placeholders.

The module is stateless; any thread may call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources

_FOLDER = resources.files("weftplan.report")


def filled(name: str, data: object, marks: Mapping[str, str]) -> str:
    """Return the template ``name`` with ``@HEAD@``, ``@DATA@`` and the given placeholders filled; values are HTML.

    >>> page = filled("lanes_page.html", {}, {"TITLE": "a run", "STORY": "@TITLE@"})
    >>> page.startswith("<!doctype html>"), page.count("a run"), '<p id="story">@TITLE@</p>' in page
    (True, 2, True)
    """
    # "</" would close the script element that holds the data.
    parts = {"DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"), **marks}
    page = _text(name).replace("@HEAD@\n", _text("page_head.html"), 1)
    # A single pass: a name that resembles a placeholder stays unchanged.
    return re.sub("@(" + "|".join(parts) + ")@", lambda match: parts[match[1]], page)


def _text(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")
