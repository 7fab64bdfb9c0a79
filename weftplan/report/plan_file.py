"""Memory plans as JSON text, one object per entry: readable, diffable, and lossless.

Reading checks the form (:class:`~weftplan.errors.FormatError`); :func:`weftplan.planner.validate` checks the plan
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import FormatError, MXNetError
from weftplan.ops.core.floats import dtype_of
from weftplan.ops.core.schema import DType, Shape
from weftplan.planner.memory_plan import Labels, MemoryPlan, PassReport
from weftplan.planner.options import PlanOptions
from weftplan.planner.storage_assignment import Kind
from weftplan.support.array_types import DTypeLike, RawArray

FORMAT = "weftplan-plan"
VERSION = 1


@dataclass(slots=True)
class StoredLabels(Labels):
    """Labels of a plan that was read from a file."""

    steps: list[int]
    names: list[str]
    shapes: list[Shape]
    dtypes: list[DType]
    makers: list[int]
    sources: list[int]
    node_names: list[str]
    node_ops: list[str]

    def name(self, eid: int) -> str:
        """Return the name of an entry."""
        return self.names[eid]

    def node_op(self, nid: int) -> str:
        """Return the operator of a node."""
        return self.node_ops[nid]

    def source(self, eid: int) -> int:
        """Return the entry whose memory this entry takes over, or -1."""
        return self.sources[eid]


def dumps(plan: MemoryPlan) -> str:
    """Return ``plan`` as JSON text."""
    labels = plan.labels
    entries = [
        {
            "name": labels.name(e),
            "maker": labels.makers[e],
            "shape": list(labels.shapes[e]),
            "dtype": str(labels.dtypes[e]),
            "nbytes": int(plan.entry_nbytes[e]),
            "kind": Kind(int(plan.entry_kind[e])).name,
            "storage": int(plan.entry_storage[e]),
            "first": int(plan.entry_first[e]),
            "last": int(plan.entry_last[e]),
            "inplace": int(plan.entry_inplace[e]),
            "source": labels.source(e),
        }
        for e in range(len(plan.entry_nbytes))
    ]
    nodes = [
        {
            "name": labels.node_names[n],
            "op": labels.node_op(n),
            "workspace": int(plan.workspace_nbytes[n]),
            "workspace_storage": int(plan.workspace_storage[n]),
        }
        for n in range(len(plan.workspace_nbytes))
    ]
    storages = [
        {
            "slab": int(plan.storage_slab[s]),
            "offset": int(plan.storage_offset[s]),
            "nbytes": int(plan.storage_nbytes[s]),
            "after": plan.after(s).tolist(),
        }
        for s in range(plan.num_storages)
    ]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "strategy": plan.strategy,
        "options": asdict(plan.options),
        "peak": plan.peak,
        "lower_bound": plan.lower_bound,
        "unshared_bytes": plan.unshared_bytes,
        "reported_bytes": plan.reported_bytes,
        "external_bytes": dict(plan.external_bytes),
        "input_bytes": plan.input_bytes,
        "outputs": list(plan.outputs),
        "num_forward": plan.num_forward,
        "added_waits": plan.num_added_waits,
        "more_time": plan.more_time,
        "elsewhere": plan.elsewhere,
        "notes": list(plan.notes),
        "passes": [graph_pass._asdict() for graph_pass in plan.passes],
        "kernels": dict(plan.kernels),
        "devices": [[c.device_type, c.device_id] for c in plan.contexts],
        "slabs": [
            {"device": int(d), "nbytes": int(n)} for d, n in zip(plan.slab_device, plan.slab_nbytes, strict=True)
        ],
        "steps": list(labels.steps),
    }
    head = json.dumps(document, indent=1)
    tables = {"storages": storages, "nodes": nodes, "entries": entries}
    rows = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, table)) + "\n ]" for name, table in tables.items()]
    return head.removesuffix("\n}") + ",\n" + ",\n".join(rows) + "\n}\n"


def loads(text: str) -> MemoryPlan:
    """Return the plan in ``text``.

    Raises:
        FormatError: not JSON, not a plan, or a newer version; names the field that is missing or malformed.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a plan: the JSON text is truncated or malformed ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f'not a plan: expected a JSON object with "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise FormatError(f"plan of version {document.get('version')!r}; this release reads version {VERSION}")
    try:
        return _plan(document)
    except KeyError as error:
        raise FormatError(f"the plan lacks field {error}") from error
    except (TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"the plan is malformed: {error}") from error
    except MXNetError as error:
        raise FormatError(f"the plan is malformed: {error}") from error


def _plan(document: dict[str, Any]) -> MemoryPlan:
    entries, nodes, storages, slabs = (document[key] for key in ("entries", "nodes", "storages", "slabs"))
    dependencies = [_integers(row["after"], len(storages), "after of a storage") for row in storages]
    pointers = np.zeros(len(storages) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in dependencies], out=pointers[1:])
    plan = MemoryPlan(
        strategy=str(document["strategy"]),
        options=PlanOptions(**document["options"]),
        contexts=tuple(Context(kind, index) for kind, index in document["devices"]),
        entry_storage=_column(entries, "storage", np.int32),
        entry_nbytes=_column(entries, "nbytes", np.int64),
        entry_kind=np.array([Kind[row["kind"]] for row in entries], dtype=np.int8),
        entry_first=_column(entries, "first", np.int32),
        entry_last=_column(entries, "last", np.int32),
        entry_inplace=_column(entries, "inplace", np.int32),
        storage_slab=_column(storages, "slab", np.int32),
        storage_offset=_column(storages, "offset", np.int64),
        storage_nbytes=_column(storages, "nbytes", np.int64),
        slab_device=_column(slabs, "device", np.int32),
        slab_nbytes=_column(slabs, "nbytes", np.int64),
        workspace_nbytes=_column(nodes, "workspace", np.int64),
        workspace_storage=_column(nodes, "workspace_storage", np.int32),
        after_ptr=pointers,
        after_storages=np.array([s for row in dependencies for s in row], dtype=np.int32),
        lower_bound=int(document["lower_bound"]),
        unshared_bytes=int(document["unshared_bytes"]),
        reported_bytes=int(document["reported_bytes"]),
        labels=StoredLabels(
            steps=_integers(document["steps"], len(nodes), "steps"),
            names=[str(row["name"]) for row in entries],
            shapes=[tuple(int(d) for d in row["shape"]) for row in entries],
            dtypes=[dtype_of(row["dtype"]) for row in entries],
            makers=_integers([row["maker"] for row in entries], len(nodes), "maker of an entry"),
            sources=_integers([row["source"] for row in entries], len(entries), "source of an entry", low=-1),
            node_names=[str(row["name"]) for row in nodes],
            node_ops=[str(row["op"]) for row in nodes],
        ),
        external_bytes={str(k): int(v) for k, v in document["external_bytes"].items()},
        input_bytes=None if document.get("input_bytes") is None else int(document["input_bytes"]),
        outputs=tuple(_integers(document["outputs"], len(entries), "outputs")),
        num_forward=None if document["num_forward"] is None else int(document["num_forward"]),
        num_added_waits=None if document.get("added_waits") is None else int(document["added_waits"]),
        more_time=float(document.get("more_time", 0.0)),
        elsewhere=int(document.get("elsewhere", 0)),
        notes=tuple(str(note) for note in document["notes"]),
        passes=tuple(
            PassReport(str(graph_pass["name"]), str(graph_pass["changed"]), str(graph_pass["switch"]))
            for graph_pass in document.get("passes", ())
        ),
        kernels={str(name): str(text) for name, text in document.get("kernels", {}).items()},
    )
    for name, rows, low, limit in (
        ("storage of an entry", plan.entry_storage, -1, plan.num_storages),
        ("workspace_storage of a node", plan.workspace_storage, -1, plan.num_storages),
        ("slab of a storage", plan.storage_slab, 0, plan.num_slabs),
        ("device of a slab", plan.slab_device, 0, len(plan.contexts)),
    ):
        _integers(rows.tolist(), limit, name, low=low)
    return plan


def _column(rows: Sequence[Mapping[str, object]], name: str, dtype: DTypeLike) -> RawArray:
    values = [row[name] for row in rows]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise FormatError(f"field {name!r} must hold integers")
    return np.array(values, dtype=dtype)


def _integers(values: list[Any], limit: int, what: str, *, low: int = 0) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < limit:
            raise FormatError(f"{what} must be an integer from {low} to {limit - 1}, got {value!r}")
    return values
