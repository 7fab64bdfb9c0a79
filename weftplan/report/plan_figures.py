"""Figures of a plan and their words. Every report takes both from here, so a word has one meaning.

The glossary defines the words. Every function reads a finished plan; any thread may call it.
"""

from __future__ import annotations

from weftplan.planner.memory_plan import MemoryPlan


def facts(plan: MemoryPlan) -> list[tuple[str, int]]:
    """Return the figures of a plan in bytes, as reports list them.

    >>> from weftplan import symbol as sym
    >>> plan = sym.exp(sym.Variable("x")).plan({"x": (1000,)}, train=False)
    >>> [name for name, nbytes in facts(plan)][:2]
    ['planned peak', 'lower bound']
    """
    rows = [
        ("planned peak", plan.peak),
        ("lower bound", plan.lower_bound),
        (_RECOMPUTED if plan.more_time else "without sharing", plan.unshared_bytes),
    ]
    if len(plan.contexts) > 1:
        rows += [(f"planned peak on {context}", nbytes) for context, nbytes in plan.peak_by_device.items()]
    rows += [(_PURPOSES.get(purpose, purpose.replace("_", " ")), nbytes) for purpose, nbytes in external(plan).items()]
    return [*rows, ("total", plan.total)]


_RECOMPUTED = "without sharing, with results that are computed again"


def external(plan: MemoryPlan) -> dict[str, int]:
    """Return the memory outside the plan, by purpose; the arguments as weights and inputs, if the plan knows which."""
    by_purpose = dict(plan.external_bytes)
    if plan.input_bytes is not None:
        by_purpose = {
            "weights": by_purpose.pop("arguments") - plan.input_bytes,
            "inputs": plan.input_bytes,
            **by_purpose,
        }
    return {purpose: nbytes for purpose, nbytes in by_purpose.items() if nbytes}


def parts(plan: MemoryPlan) -> dict[str, int]:
    """Return the parts of the total in a few words; only parts that take bytes.

    >>> from weftplan import models
    >>> list(parts(models.get("mlp").plan(data=(32, 784))))
    ['planned peak', 'weights', 'inputs', 'gradients']
    """
    by_part = {"planned peak": plan.peak} if plan.peak else {}
    for purpose, nbytes in external(plan).items():
        part = "kvstore" if purpose.startswith("kvstore") else _PARTS.get(purpose, purpose.replace("_", " "))
        by_part[part] = by_part.get(part, 0) + nbytes
    return by_part


_PURPOSES = {
    "arguments": "arguments: weights and inputs",
    "gradients": "gradients of arguments",
    "aux": "auxiliary states",
    "head_grads": "gradients of outputs",
    "optimizer_states": "states of the optimizer",
    "cublas_workspaces": "workspaces of cuBLAS, one for each worker",
    "host_copies": "Module's copies on the host",
    "kvstore_stored": "weights that the kvstore keeps",
    "kvstore_merged": "sums of gradients in the kvstore",
    "kvstore_staging": "copies of gradients at the place of the sum",
    "kvstore_compression": "residuals and packed gradients of the kvstore",
    "kvstore_exchange": "memory for exchanges between processes",
    "kvstore_wire": "copies on the host of what travels between processes",
    "kvstore_residual": "residuals of what travels between processes",
    "kvstore_server": "values that this process serves",
    "other_devices": "executors of the other devices",
}


_PARTS = {
    "arguments": "weights and inputs",
    "aux": "auxiliary states",
    "head_grads": "gradients",
    "optimizer_states": "optimizer",
    "cublas_workspaces": "workspaces of cuBLAS",
    "host_copies": "copies on the host",
}
"""Purposes in fewer words."""
_MEANINGS = {
    "planned peak": "Memory that the planner places: results, gradients in flight, outputs, scratch. It is allocated.",
    "lower bound": "The most bytes in use at one step. No placement of these buffers in this order can need less.",
    "without sharing": "What the results take if each has memory of its own, also those computed in place; operators "
    "share scratch.",
    _RECOMPUTED: "The same figure for the steps of this plan, which compute some results twice.",
    "weights": "Arguments without a given shape: arrays that training changes.",
    "inputs": "Arguments with a given shape, and labels: one batch.",
    "arguments: weights and inputs": "Arrays that you bring, or that simple_bind and Module make.",
    "gradients of arguments": "One array for each argument whose gradient is wanted.",
    "auxiliary states": "Arrays that operators update, such as the moving averages of BatchNorm.",
    "gradients of outputs": "What you give to backward where no loss is at the end.",
    "states of the optimizer": "What the optimizer keeps from step to step, such as momentum.",
    "workspaces of cuBLAS, one for each worker": "Scratch of cuBLAS's handles; executors on one GPU share it.",
    "Module's copies on the host": "Module keeps the parameters in host memory too, to save and share them.",
    "weights that the kvstore keeps": "One copy of each weight, from which every device pulls.",
    "sums of gradients in the kvstore": "Merge buffers, where the gradients of all devices are added.",
    "copies of gradients at the place of the sum": "Gradients of other devices, brought to where they are added.",
    "residuals and packed gradients of the kvstore": "What gradient compression has not sent yet, and what it sends.",
    "memory for exchanges between processes": "What others read of this process, or where it receives what they send.",
    "copies on the host of what travels between processes": "Sums made on devices pass page-locked host memory.",
    "residuals of what travels between processes": "What gradient compression has not sent to other processes yet.",
    "values that this process serves": "Its share of the values of dist_async, with a gradient for each.",
    "executors of the other devices": "Planned memory and arrays of the devices beside the one that is drawn.",
    "total": "The planned peak and everything above that is not part of it. A budget limits this figure.",
}


def meaning(figure: str) -> str:
    """Return the definition of a figure of :func:`facts`."""
    if figure.startswith("planned peak on "):
        return "The part of the planned peak that is on this device."
    return _MEANINGS[figure]


def milliseconds(seconds: float | None) -> str:
    """Return the time of a pass, for readers; empty if it is unknown.

    >>> milliseconds(0.00123), milliseconds(None)
    ('1.23 ms', '')
    """
    return "" if seconds is None else f"{1e3 * seconds:.2f} ms"
