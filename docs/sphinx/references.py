"""A Sphinx extension for references in docstrings: a name links to the page that documents its object.

Docstrings name objects by their defining module; the reference documents them under their public names. A name without
a page, such as an internal function or a class of another package, is shown without a link. A name that does not exist
is a warning, and so an error of the build.
"""

from __future__ import annotations

from typing import Any

from api_objects import look_up
from docutils.nodes import Element, TextElement, document
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode


def documented(env: BuildEnvironment) -> dict[Any, str]:
    """Return the public name of every documented object, by the object's identity and by its last name if unique."""
    names: dict[Any, str] | None = getattr(env, "names_of_objects", None)
    if names is None:
        names, short = {}, {}
        for name in env.domains.python_domain.objects:
            short[name.rpartition(".")[2]] = "" if name.rpartition(".")[2] in short else name
            try:
                names.setdefault(id(look_up(name)), name)
            except LookupError:
                continue
        names.pop(id(None), None)
        names |= short
        env.names_of_objects = names  # type: ignore[attr-defined]
    return names


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: TextElement) -> Element | None:
    """Return a link to the documented object, plain text if it has no page, or None if it does not exist."""
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"]
    try:
        name = documented(env).get(id(look_up(target)))
    except LookupError:
        name = documented(env).get(target)
        if not name and "refwarn" in node:  # from a docstring, not from a signature's type
            return None
    if not name:
        return contnode
    entry = env.domains.python_domain.objects[name]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)


def be_exact(app: Sphinx, tree: document) -> None:
    """Remove ``refspecific`` from all references, so that ``type`` does not match an attribute of that name."""
    for node in tree.findall(pending_xref):
        if node.hasattr("refspecific"):
            del node["refspecific"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hooks."""
    app.connect("missing-reference", resolve)
    app.connect("doctree-read", be_exact)
    return {"parallel_read_safe": True}
