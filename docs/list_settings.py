"""List what settings do, and the tests that show it.

``python docs/list_settings.py`` writes ``docs/flags.md``: every flag and variable on Paddle's and MXNet's pages about
memory, and every other setting. The package's table of variables describes the effects. The tests that change a setting
and observe its effect have the mark ``shows``, which is read without running them. A test compares the page with the
text that this script would write, and fails for a setting that claims an effect and has no test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from weftplan.config import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/flags.md"
PAGES = {
    "Paddle: storage": (
        "FLAGS_allocator_strategy",
        "FLAGS_eager_delete_scope",
        "FLAGS_eager_delete_tensor_gb",
        "FLAGS_fast_eager_deletion_mode",
        "FLAGS_fraction_of_cpu_memory_to_use",
        "FLAGS_fraction_of_cuda_pinned_memory_to_use",
        "FLAGS_fraction_of_gpu_memory_to_use",
        "FLAGS_fuse_parameter_groups_size",
        "FLAGS_fuse_parameter_memory_size",
        "FLAGS_init_allocated_mem",
        "FLAGS_initial_cpu_memory_in_mb",
        "FLAGS_initial_gpu_memory_in_mb",
        "FLAGS_memory_fraction_of_eager_deletion",
        "FLAGS_reallocate_gpu_memory_in_mb",
    ),
    "Paddle: speed": ("FLAGS_cudnn_exhaustive_search", "FLAGS_enable_cublas_tensor_op_math"),
    "MXNet: environment": (
        "MXNET_GPU_WORKER_NTHREADS",
        "MXNET_GPU_COPY_NTHREADS",
        "MXNET_CPU_WORKER_NTHREADS",
        "MXNET_CPU_PRIORITY_NTHREADS",
        "MXNET_EXEC_ENABLE_INPLACE",
        "MXNET_EXEC_MATCH_RANGE",
        "MXNET_EXEC_NUM_TEMP",
        "MXNET_GPU_MEM_POOL_RESERVE",
        "MXNET_ENGINE_TYPE",
        "MXNET_KVSTORE_REDUCTION_NTHREADS",
        "MXNET_KVSTORE_BIGARRAY_BOUND",
        "MXNET_ENABLE_GPU_P2P",
        "MXNET_BACKWARD_DO_MIRROR",
        "MXNET_CUDNN_AUTOTUNE_DEFAULT",
    ),
}
"""The settings that each page of Paddle or MXNet names."""


def shown(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (pattern of a setting's name, ``file::test``) of every mark ``shows`` below ``folder``."""
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.shows(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                    for argument in mark.args:
                        yield ast.literal_eval(argument), f"{path.relative_to(ROOT).as_posix()}::{node.name}"


def rows() -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    """Return (page, name, default, effect, tests) of every setting."""
    variables = {variable.name: variable for variable in table()}
    found = list(shown(ROOT / "tests"))
    chosen = [(page, name) for page, names in PAGES.items() for name in names]
    named = {name for _, name in chosen}
    chosen += [(f"other: {v.group}", v.name) for v in table() if v.name not in named]
    return [
        (
            page,
            name,
            str(variables[name].default),
            variables[name].effect,
            tuple(test for pattern, test in found if fnmatch(name, pattern)),
        )
        for page, name in chosen
    ]


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# Flags and variables",
        "",
        "Every flag and variable that the documentation of PaddlePaddle and MXNet names for memory and its speed, and",
        "every other setting: its effect here, and the test that changes it and observes the effect.",
        "[environment.md](environment.md) has legal values and meanings. `python docs/list_settings.py` makes this",
        "page.",
        "",
        "A setting of the planner or the bulk execution changes no bit of a result, unless its effect says that a sum",
        "is rounded in another order.",
        "",
        "| from | setting | default | effect here | shown by |",
        "|---|---|---|---|---|",
    ]
    for origin, name, default, effect, tests in rows():
        links = ", ".join(f"[{test.partition('::')[2]}](../{test.partition('::')[0]})" for test in tests)
        lines.append(f"| {origin} | `{name}` | {default} | {effect} | {links or '-'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
