"""The README as the package's page on an index, where relative links do not work.

Hatchling uses :class:`PackagePage` when it builds a wheel or an sdist. If ``[project.urls]`` has an address ``Source``,
relative links lead to this version's files there. Otherwise a link is replaced by its text, and a picture is left out.
Extras are installed by the package's name instead of from a checkout.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def without_relative_links(text: str, base: str | None) -> str:
    """Return Markdown whose relative links lead below ``base``; without a base they are plain text.

    >>> without_relative_links("[how](docs/a.md), ![a plan](b.png)[web](https://example.org)", None)
    'how, [web](https://example.org)'
    >>> without_relative_links("[how](docs/a.md#top) and [here](#x)", "https://example.org/blob/v1")
    '[how](https://example.org/blob/v1/docs/a.md#top) and [here](#x)'
    """

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if base is None:
            return "" if mark else label
        return f"{mark}[{label}]({base}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


class PackagePage(MetadataHookInterface):
    """The Hatchling hook that sets the package's long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme`` in the metadata."""
        source = metadata.get("urls", {}).get("Source")
        base = f"{source}/blob/v{metadata['version']}" if source else None
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"'\.\[(?!dev)", f"'{metadata['name']}[", without_relative_links(text, base))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
