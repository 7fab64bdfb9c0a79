"""``grad_req`` values of arguments, and the attributes that gradient nodes inherit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weftplan.errors import MXNetError
from weftplan.ops.core.schema import Req

INHERITED = ("__ctx_group__", "ctx_group")
"""Attributes that gradient nodes inherit from their forward node."""
GRAD_REQS = {"null": Req.NULL, "write": Req.WRITE, "add": Req.ADD}
"""The OpReq code of each valid ``grad_req``."""


def read_grad_req(
    grad_req: str | Mapping[str, str], arguments: Collection[str], error: type[MXNetError]
) -> dict[str, str]:
    """Return the grad_req of each argument, from one value for all or a dictionary (missing: null).

    Raises:
        MXNetError: of the class ``error``, if a value is not in :data:`GRAD_REQS`.
    """
    given = dict.fromkeys(arguments, grad_req) if isinstance(grad_req, str) else grad_req
    wanted = {name: given.get(name, "null") for name in arguments}
    for name, req in wanted.items():
        if not isinstance(req, str) or req not in GRAD_REQS:
            raise error(f"grad_req of {name!r} must be one of {', '.join(GRAD_REQS)}; got {req!r}")
    return wanted
