"""Write the stubs of ``mx.sym`` and ``mx.nd``, which type checkers and editors read, from the registry of operators.

python docs/write_stubs.py            # writes weftplan/symbol/registered.pyi and weftplan/ndarray/registered.pyi
"""

from __future__ import annotations

from pathlib import Path

import weftplan
from weftplan import ndarray, symbol
from weftplan.ndarray.operators import EXTRA
from weftplan.ops import registry
from weftplan.ops.signatures import stub

PACKAGE = Path(weftplan.__file__).parent
HEAD = '''"""{name}: one function for every operator. Written by docs/write_stubs.py; do not edit."""

# ruff: noqa: E501
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from {module} import {array}
'''


def stubs() -> dict[Path, str]:
    """The text of every stub file."""
    found = {}
    for name, package, module, array, extra in (
        ("mx.sym", symbol, "weftplan.symbol.symbol", "Symbol", ("name", "attr")),
        ("mx.nd", ndarray, "weftplan.ndarray.array", "NDArray", EXTRA),
    ):
        names = [n for n in sorted(registry.names()) if not n.startswith("_") and n not in package.__all__]
        head = HEAD.format(name=name, module=module, array=array)
        lines = [stub(n, registry.get(n), array, extra) for n in names if n.isidentifier()]
        found[Path(package.__file__).with_name("registered.pyi")] = head + "\n" + "\n".join(lines) + "\n"
    return found


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(PACKAGE.parent)}")
