"""Node attributes: scopes that add them, short names that are stored as ``__name__``, and ``grad_req`` of arguments."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from weftplan.errors import MXNetError, ParameterError
from weftplan.ops.core.schema import Req

HIDDEN_KEYS = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")
"""Attributes that users write without underscores and files store with underscores."""
INHERITED = ("__ctx_group__", "ctx_group")
"""Attributes that gradient nodes inherit from their forward node."""
GRAD_REQS = {"null": Req.NULL, "write": Req.WRITE, "add": Req.ADD}
"""The OpReq code of each valid ``grad_req``."""


class _Current(type):
    """A metaclass that gives the class MXNet's ``current`` property."""

    @property
    def current(cls) -> AttrScope:
        """The merged attributes of this thread's scopes; assignment replaces them until the innermost ``with`` ends."""
        return AttrScope(**_local.stack[-1])

    @current.setter
    def current(cls, scope: AttrScope) -> None:
        _local.stack[-1] = dict(scope._attr)


class AttrScope(metaclass=_Current):
    """A scope of attributes for every node made inside ``with AttrScope(ctx_group="dev1"):``; inner scopes win.

    Raises:
        ParameterError: a value is not text.

    >>> with AttrScope(ctx_group="dev1", __lr_mult__="0.1"), AttrScope(ctx_group="dev2"):
    ...     current({"__wd_mult__": "0"})
    {'ctx_group': 'dev2', '__lr_mult__': '0.1', '__wd_mult__': '0'}
    """

    def __init__(self, **attributes: str) -> None:
        for key, value in attributes.items():
            if not isinstance(value, str):
                raise ParameterError(f"AttrScope: attribute {key!r} must be text, got {type(value).__name__} {value!r}")
        self._attr = attributes

    def get(self, attr: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a new dictionary: the scope's own attributes, updated with ``attr``.

        Raises:
            ParameterError: a value of ``attr`` is not text.
        """
        if not attr:
            return dict(self._attr)
        for key, value in attr.items():
            if not isinstance(value, str):
                raise ParameterError(f"attribute {key!r} must be text, got {type(value).__name__} {value!r}")
        return {**self._attr, **attr}

    def __enter__(self) -> AttrScope:
        # Merge on each entry and push the result on the stack, so that a scope may be entered several times.
        _local.stack.append({**_local.stack[-1], **self._attr})
        return self

    def __exit__(self, *exc: object) -> None:
        _local.stack.pop()


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[dict[str, str]] = [{}]


_local = _Local()


def current(attr: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the attributes of this thread's scopes, updated with ``attr``, as :meth:`AttrScope.get` does."""
    scope = _local.stack[-1]
    return AttrScope(**scope).get(attr) if attr else dict(scope)


def stored_key(key: str, source: str) -> str:
    """Return the key under which a node attribute is stored: hidden names get their underscores.

    Raises:
        ParameterError: the key means an attribute of an input (``weight_lr_mult``).

    >>> stored_key("lr_mult", "fc1"), stored_key("kernel", "conv")
    ('__lr_mult__', 'kernel')
    """
    for hidden in HIDDEN_KEYS:
        if key.startswith(hidden):
            return f"__{key}__"
        if key.endswith(f"_{hidden}"):
            owner = key.removesuffix(f"_{hidden}")
            raise ParameterError(
                f"{source}: {key!r} would belong to input {owner!r}; make that input yourself and set it there: "
                f"{owner}=Variable({owner!r}, {hidden}=...)"
            )
    return key


def with_short_forms(attrs: Mapping[str, str]) -> dict[str, str]:
    """Return ``attrs``, with each hidden ``__name__`` also under its short name."""
    result = dict(attrs)
    for hidden in HIDDEN_KEYS:
        value = attrs.get(f"__{hidden}__")
        if value is not None:
            result[hidden] = value
    return result


def read_grad_req(
    grad_req: str | Mapping[str, str], arguments: Collection[str], error: type[MXNetError]
) -> dict[str, str]:
    """Return the grad_req of each argument, from one value for all or a dictionary (missing: null).

    Args:
        grad_req: one of :data:`GRAD_REQS`, or a value for each argument.
        arguments: names of the arguments.
        error: class of the error to raise.

    Raises:
        MXNetError: of the class ``error``, if a value is not in :data:`GRAD_REQS`.
    """
    requests = dict.fromkeys(arguments, grad_req) if isinstance(grad_req, str) else grad_req
    reqs = {name: requests.get(name, "null") for name in arguments}
    for name, req in reqs.items():
        if not isinstance(req, str) or req not in GRAD_REQS:
            raise error(f"grad_req of {name!r} must be one of {', '.join(GRAD_REQS)}; got {req!r}")
    return reqs
