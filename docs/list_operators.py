"""Write the page of operators, docs/operators.md, from the registry: gradients, GPUs, ONNX, and gaps against MXNet.

    python docs/list_operators.py

A test compares the page with the text that this script would write.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

from weftplan.convert.onnx_in.reading import FOLDS as READ_CONSTANTS
from weftplan.convert.onnx_in.reading import RULES as READ
from weftplan.convert.onnx_out.writing import RULES as WRITTEN
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operators.md"
MXNET = ROOT / "tests" / "golden" / "data" / "operator_names.txt"
"""Names of MXNet 1.9.1's operators, one per line, from ``mxnet.operator.get_all_registered_operators()``."""
for _name in ("convert.onnx_in", "convert.onnx_out"):
    importlib.import_module(f"weftplan.{_name}")  # fills the tables of rules


def gradient(op: Op) -> str:
    """Return the cell that says whether an operator has a gradient: ``yes``, ``a loss`` or ``-``."""
    if op.gradient is None:
        return "-"
    return "a loss" if op.loss else "yes"


def on_gpu(op: Op) -> str:
    """Return the cell that says whether an operator's kernel runs on a GPU, or fetches some values to the host."""
    module = sys.modules.get(getattr(inspect.unwrap(op.forward), "__module__", ""))
    fetches = module is not None and "hasattr(" in (source := inspect.getsource(module)) and ".get()" in source
    return "yes, part of it on the host" if fetches else "yes"


def ours() -> dict[str, tuple[Op, list[str]]]:
    """Return {name: (operator, its aliases)} of the operators that users call by name."""
    found: dict[str, tuple[Op, list[str]]] = {}
    for name in sorted(registry.names()):
        op = registry.get(name)
        if op.backward_of is not None or name.startswith("_backward"):
            continue
        if name == op.name:
            found.setdefault(name, (op, []))
        else:
            found.setdefault(op.name, (op, []))[1].append(name)
    return dict(sorted(found.items(), key=lambda item: (item[0].lstrip("_").lower(), item[0])))


def missing() -> list[str]:
    """Return MXNet's operators that weftplan lacks, without gradients and MXNet's internal names."""
    known = set(registry.names())
    inside = re.compile(
        "(_contrib|_npi|_npx|_np)?_?(backward|broadcast_backward|split_v2_backward|sg_|sparse|cv|foreach|while_loop|cond$|"
        "Cached|Fused|TensorRT|Custom|CrossDevice|NDArray|Native|NoGradient|set_value|quantized|calibrate|dgl|edge_id|getnnz|"
        "intgemm|Sparse|cuda)"
    )
    names = MXNET.read_text(encoding="utf-8").split()
    return sorted(name for name in names if name not in known and not inside.match(name) and "backward" not in name)


def page() -> str:
    """Return the text of the page."""
    rows = []
    for name, (op, others) in ours().items():
        also = ", ".join(f"`{other}`" for other in others)
        onnx = "yes" if name in WRITTEN else "-"
        rows.append(f"| `{name}` | {also} | {gradient(op)} | {on_gpu(op)} | {onnx} |")
    read = ", ".join(f"`{name}`" for name in sorted({*READ, *READ_CONSTANTS}))
    lost = missing()
    return f"""# Operators

This page lists every operator under the name that symbol files use, with its other names, and says whether it has a
gradient, runs on a GPU, and can be exported to ONNX. Outputs, gradients and changed states were compared with MXNet
1.9.1's where MXNet has the operator. In the tests the kernels for GPUs run on a stand-in for CuPy, which refuses what
CuPy refuses. `python docs/list_operators.py` makes this page.

| operator | also | gradient | GPU | ONNX, out |
|---|---|---|---|---|
{chr(10).join(rows)}

{len(rows)} operators.

## Read from ONNX

{read}.

## Operators of MXNet 1.9.1 that are not there

{len(lost)} names of MXNet's list, without gradients, sparse arrays, graphs, integer arithmetic of quantized networks
and internals of MXNet. A file that has one opens all the same: [Open an MXNet
model](mxnet-models.md#an-operator-that-weftplan-does-not-have) shows what can be used, and how a class in Python fills
the gap.

{", ".join(f"`{name}`" for name in lost)}.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
