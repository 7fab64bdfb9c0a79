"""Pages of the API reference, made from the public names of the package.

Each namespace has a page: its docstring, its functions, then its classes. Each class has a page of its own. Operators
are documented once, by family. Sphinx fills the pages from docstrings. A method whose docstring has the field ``:meta
private:`` is for other folders of the package and is left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from weftplan.ops.core import registry
from weftplan.ops.core.operator_modules import OPERATORS
from weftplan.ops.core.schema import Op

SECTIONS = {
    "Networks and training": {
        "sym": "networks as symbols",
        "executor": "a symbol with arrays and planned memory",
        "mod": "modules: fit, score, predict",
        "model": "checkpoints, FeedForward",
        "models": "built-in networks",
        "optimizer": "optimizers",
        "lr_scheduler": "learning rates",
        "init": "initializers",
        "metric": "metrics",
        "callback": "callbacks",
        "monitor": "statistics of intermediate results",
        "rnn": "recurrent cells",
    },
    "Memory": {
        "planner": "memory plans",
        "storage": "pools and their statistics",
        "torch": "training steps of PyTorch within a budget",
    },
    "Scheduling and exchange": {
        "engine": "tasks and the dependency engine",
        "kv": "the kvstore",
        "profiler": "traces",
    },
    "Arrays and data": {
        "nd": "arrays",
        "random": "random numbers",
        "io": "iterators over batches",
        "recordio": "record files",
        "image": "images",
        "context": "devices",
    },
    "Files and other systems": {
        "convert": "ONNX and safetensors",
        "onnx": "MXNet's names for ONNX",
        "viz": "pictures of networks",
        "operator": "operators in Python",
        "contrib": "MXNet's contrib",
    },
    "Everything else": {
        "config": "environment variables",
        "errors": "exception classes",
        "runtime": "features",
        "util": "MXNet's switches",
        "base": "MXNet's base",
        "log": "logging",
        "name": "names of nodes",
        "attribute": "attributes of nodes",
        "test_utils": "helpers for tests",
    },
}
"""The namespaces of ``mx`` that have a page, with descriptions, by their section in the index."""
FIRST = {
    "engine": "submit task map wait as_completed future tiles var_of get create using set_engine",
    "planner": "plan plan_within plan_symbol size_symbol validate pack",
    "kv": "create",
    "storage": "memory_summary snapshot empty_cache reset_peaks get using",
    "nd": "array zeros ones full empty arange load save waitall",
    "sym": "Variable Group load load_json",
    "profiler": "set_config set_state dump dumps to_html",
    "convert": "fold_batch_norm fold_constants",
}
"""Functions that a page lists first; the others follow by name."""
VERBS = {
    "engine.Engine": "push push_async wait_for_var wait_for_all new_variable bulk",
    "executor.Executor": "forward backward copy_params_from reshape",
    "io.DataIter": "next reset provide_data provide_label",
    "kv.KVStore": "init push pull pushpull set_optimizer",
    "mod.Module": "fit score predict bind init_params init_optimizer forward backward update save_checkpoint load",
    "nd.NDArray": "asnumpy copy copyto astype reshape as_in_context wait_to_read",
    "planner.MemoryPlan": "peak total summary bars to_html plot batch_max compare",
    "sym.Symbol": "list_arguments list_outputs infer_shape simple_bind bind plan get_internals save tojson",
}
"""Members that the page of a class lists first."""
OPTIONAL = {"torch"}
"""Namespaces of functions that need another package, which may be absent when the pages are written."""
HIDDEN = {
    "engine": {"OprBlock", "dedupe", "nested"},
    "errors": {"did_you_mean", "listed", "own", "shape_text"},
    "nd": {"Chunk", "spilling"},
}
"""Names that have no page, because only other folders of the package use them."""


def module_of(name: str) -> ModuleType:
    """Return the module of a namespace."""
    return importlib.import_module(f"weftplan.{name}")


def names(name: str) -> list[str]:
    """Return the public functions and classes of a namespace that are documented on its pages, without operators."""
    module = module_of(name)
    public = getattr(module, "__all__", None) or [
        item for item in dir(module) if getattr(getattr(module, item), "__module__", None) == module.__name__
    ]
    return [item for item in public if not item.startswith("_") and item not in HIDDEN.get(name, ())]


def members(name: str) -> tuple[list[str], list[str]]:
    """Return (functions, classes) of a namespace; functions that callers need first come first."""
    module = module_of(name)
    public = names(name)
    if name in OPTIONAL:
        return public, []
    first = FIRST.get(name, "").split()
    functions = [item for item in public if inspect.isroutine(getattr(module, item))]
    functions.sort(key=lambda item: (first.index(item) if item in first else len(first), item.lower()))
    return functions, [item for item in public if inspect.isclass(getattr(module, item))]


def write(folder: Path) -> None:
    """Write all pages into a new folder. A class or function in several namespaces is documented in the first."""
    folder.mkdir(parents=True)
    seen: set[object] = set()
    for namespaces in SECTIONS.values():
        for name in namespaces:
            write_namespace(folder, name, seen)
    (folder / "operators.rst").write_text(operators(), encoding="utf-8")
    (folder / "index.rst").write_text(index(), encoding="utf-8")


def write_namespace(folder: Path, name: str, seen: set[object]) -> None:
    """Write the pages of a namespace and of its classes; ``seen`` contains the objects that already have a page."""
    functions, classes = members(name)
    module = f"weftplan.{name}"

    def is_new(item: str) -> bool:
        known = id(getattr(module_of(name), item)) if name not in OPTIONAL else item
        return known not in seen and not seen.add(known)

    text = [*title(f"mx.{name}"), f".. automodule:: {module}", "", f".. currentmodule:: {module}", ""]
    if functions:
        text += [*title("Functions", "-"), *summary(functions)]
    if classes:
        text += [*title("Classes", "-"), *summary(classes)]
    for item in filter(is_new, functions):
        text += [f".. autofunction:: {item}", ""]
    new = list(filter(is_new, classes))
    if name == "errors":  # short classes, on one page
        for item in new:
            text += [f".. autoclass:: {item}", "   :members:", "   :show-inheritance:", ""]
    else:
        text += toctree(f"{name}/{item}" for item in new)
        for item in new:
            (folder / name).mkdir(exist_ok=True)
            page = [*title(f"mx.{name}.{item}"), f".. currentmodule:: {module}", ""]
            verbs = VERBS.get(f"{name}.{item}", "").split()
            page += summary(f"{item}.{verb}" for verb in verbs) if verbs else []
            page += [f".. autoclass:: {item}"]
            page += ["   :members:", f"   :inherited-members: {', '.join(IMPLIED)}", "   :show-inheritance:", ""]
            (folder / name / f"{item}.rst").write_text("\n".join(page), encoding="utf-8")
    (folder / f"{name}.rst").write_text("\n".join(text), encoding="utf-8")


IMPLIED = ("object", "tuple", "dict", "list", "str", "int", "Enum", "IntEnum", "Exception")
"""Python's own base classes, whose members are not listed."""


def operators() -> str:
    """Return the page of operators: one entry each, by family."""
    module = module_of("sym")
    families: dict[str, list[str]] = {}
    for item in dir(module):
        if registry.contains(item) and registry.get(item).name == item:
            families.setdefault(FAMILIES[family(registry.get(item))], []).append(item)
    text = [
        *title("Operators in detail"),
        "Each is a function of symbols, ``mx.sym.NAME``, and of arrays, ``mx.nd.NAME``, with the same inputs and",
        "parameters. The :doc:`table of operators </docs/operators>` says which have a gradient.",
        "",
        ".. currentmodule:: weftplan.sym",
        "",
    ]
    for heading, items in sorted(families.items()):
        text += [*title(heading, "-"), *summary(items)]
        for item in items:
            text += [f".. autofunction:: {item}", ""]
    return "\n".join(text)


def family(op: Op) -> str:
    """Return the folder of ``weftplan/ops`` that registers an operator."""
    return next(module.split(".")[1] for module, names in OPERATORS.items() if op.name in names.split())


FAMILIES = {
    "contrib": "Contributed and rare operators",
    "creation": "Creation",
    "elementwise": "Elementwise",
    "indexing": "Indexing",
    "linalg": "Linear algebra",
    "nn": "Layers of networks",
    "optimizer": "Updates of weights",
    "random": "Random numbers",
    "reduction": "Reductions",
    "shape": "Shapes",
}
"""Headings on the page of operators, by the folder of ``weftplan/ops`` that defines the operators."""


def index() -> str:
    """Return the page that lists the namespaces."""
    text = [*title("API reference"), "``import weftplan as mx`` gives these namespaces, under MXNet's names.", ""]
    for section, namespaces in SECTIONS.items():
        text += [*title(section, "-")]
        for name, about in namespaces.items():
            text += [f":doc:`mx.{name} <{name}>`", f"    {about[0].upper()}{about[1:]}.", ""]
    text += ["The functions of ``mx.sym`` and ``mx.nd`` that are operators: :doc:`operators`.", ""]
    pages = [name for namespaces in SECTIONS.values() for name in namespaces]
    return "\n".join(text + toctree([*pages, "operators"]))


def title(text: str, line: str = "=") -> list[str]:
    """Return the lines of a heading."""
    return [text, line * len(text), ""]


def summary(items: Iterable[str]) -> list[str]:
    """Return the lines of a table of names, each with the first sentence of its docstring."""
    return [".. autosummary::", "   :nosignatures:", "", *(f"   {item}" for item in items), ""]


def toctree(pages: Iterable[str]) -> list[str]:
    """Return the lines of a hidden list of pages for the navigation."""
    lines = [f"   {page}" for page in pages]
    return [".. toctree::", "   :hidden:", "   :maxdepth: 1", "", *lines, ""] if lines else []
