"""Write the table of the modules that register operators and kernels, weftplan/ops/core/operator_modules.py.

``python docs/refresh.py`` calls this. A fresh process imports every module of the rooms of operators and records, for
each registered name, the module that was running.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import FrameType

from weftplan.errors import UnknownOperatorError
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.implementations import Implementation
from weftplan.ops.core.schema import Op

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "weftplan/ops/core/operator_modules.py"
ROOMS = ("ops", "kernels")
"""Rooms whose modules register operators, or implementations of operators."""
HEAD = '''"""The modules that register operators and their kernels. Written by docs/refresh.py; do not edit.

A module is imported when one of its names is first asked for. Module names are relative to ``weftplan``.
"""
'''
TABLES = {
    "OPERATORS": "Names of operators, by the module that registers them.",
    "ALIASES": "Their other names, by the same modules.",
    "HOST": "Operators with a compiled implementation for CPUs, by the module that provides it.",
    "GPU": "Operators with an implementation for GPUs, by the module that provides it.",
}


def record() -> dict[str, dict[str, list[str]]]:
    """Import every module of the rooms and return {table: {module: names}}; for a process without operators.

    The stored table is ignored, because it may name modules that have moved. A module that needs an operator of a later
    module is imported again after it.
    """
    tables: dict[str, dict[str, list[str]]] = {name: {} for name in TABLES}
    register, provide, planner_op = registry.register, implementations.provide, registry.register_planner_op
    registry._MODULES.clear()
    registry._MODULE_OF.clear()
    registry.is_packaged = lambda name: True  # a check of declarations would need operators of later modules
    for provided in implementations._PROVIDED.values():
        provided.modules.clear()

    def note(table: str, *names: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        assert frame is not None, names
        module = frame.f_globals["__name__"].removeprefix("weftplan.")
        tables[table].setdefault(module, []).extend(names)

    def recorded_register(*ops: Op) -> Op:
        for op in ops:
            for name in (op.name, *op.aliases):  # a failed import may have registered them
                registry._OPS.pop(name, None)
                registry._ALIASES.pop(name, None)
            note("OPERATORS", op.name)
            note("ALIASES", *op.aliases)
        return register(*ops)

    def recorded_provide(op: str, implementation: Implementation, *, on: str = "host") -> None:
        note({"host": "HOST", "gpu": "GPU"}[on], op)
        provide(op, implementation, on=on)

    def again(op: Op) -> Op:
        registry._PLANNERS.pop(op.name, None)
        return planner_op(op)

    registry.register, implementations.provide, registry.register_planner_op = (
        recorded_register,
        recorded_provide,
        again,
    )
    rooms = [(str(ROOT / "weftplan" / room), f"weftplan.{room}.") for room in ROOMS]
    waiting = [module.name for folder, prefix in rooms for module in pkgutil.walk_packages([folder], prefix)]
    while waiting:
        failed = []
        for name in waiting:
            try:
                importlib.import_module(name)
            except (UnknownOperatorError, KeyError):
                failed.append(name)
        assert len(failed) < len(waiting), f"these modules need operators that no module registers: {failed}"
        waiting = failed
    return tables


def text() -> str:
    """Return the text of the table: one line for each module."""
    code = "import json, list_operator_modules; print(json.dumps(list_operator_modules.record()))"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    parts = [HEAD]
    for table, modules in json.loads(done.stdout).items():
        rows = [
            f'    "{module}": "{" ".join(sorted({*names}))}",\n' for module, names in sorted(modules.items()) if names
        ]
        parts.append(f'\n{table} = {{\n{"".join(rows)}}}\n"""{TABLES[table]}"""\n')
    return "".join(parts)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
