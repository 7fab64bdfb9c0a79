"""Peaks of PyTorch's own list of operators, forward and backward, compared with a hook on the allocator."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.allocator_hook import hook  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.errors import PlanError  # noqa: E402
from weftplan.torch import estimate  # noqa: E402
from weftplan.torch.private import tensors_in  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLED = 60
"""Operators of the quick sweep."""
REFUSED = {
    "argwhere combinations masked_select": "the shape of the result depends on values",
    "nn.functional.ctc_loss tensor_split": "the operator reads values",
    "linalg.lstsq linalg.lstsq.grad_oriented": "PyTorch has no kernel for fake tensors",
    "sparse.mm.reduce sparse.sampled_addmm to_sparse": "sparse tensors",
}
DIFFERENT = {
    "cumprod masked.cumprod masked_scatter prod": "the gradient formula depends on values; the estimate is larger",
    "linalg.matrix_rank linalg.matrix_rank.hermitian": "on fake tensors singular vectors are computed, too",
    "linalg.householder_product ormqr": "on fake tensors the gradient formula works out of place, in smaller parts",
    "nn.functional.local_response_norm nn.functional.multi_head_attention_forward masked.cumsum": (
        "a number of Python that autograd saves takes 4 or 8 bytes"
    ),
}
"""Operators whose estimate is not the real peak."""


def names(reasons: dict[str, str]) -> set[str]:
    """Return all names in the keys of a table."""
    return set(" ".join(reasons).split())


def peaks(op: Any) -> tuple[int, Any]:
    """Return the real peak of an operator on its first sample, and the estimate; both without bytes from before."""
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)))
    leaves = tensors_in((sample.input, sample.args, sample.kwargs))

    def step(function: Any, first: Any, args: Any, kwargs: Any, leaves: Any) -> None:
        results = [t for t in tensors_in(function(first, *args, **kwargs)) if t.requires_grad]
        if results:
            sum(t.abs().sum() if t.is_complex() else t.sum() for t in results).backward()
        for leaf in leaves:
            leaf.grad = None

    called, name = op.op, op.name if getattr(torch, op.name, None) is op.op else ""  # `op` has references of SciPy

    def function(*args: Any, **kwargs: Any) -> Any:
        """Call the operator as user code does, by its name if it has one."""
        return (getattr(torch, name) if name else called)(*args, **kwargs)

    given = (function, sample.input, sample.args, sample.kwargs, leaves)
    step(*given)
    step(*given)
    real = hook().peak(step, *given)
    return real, estimate(step, *given)


def faults(operators: Iterable[Any]) -> list[str]:
    """Return a line for each operator whose estimate is not as expected."""
    lines = []
    for op in operators:
        try:
            real, actual = peaks(op)
        except PlanError as error:
            if op.full_name not in names(REFUSED):
                lines.append(f"{op.full_name}: {error}")
            continue
        peak = actual.peak - actual.before
        if peak != real and op.full_name not in names(DIFFERENT) and not actual.unseen:
            lines.append(f"{op.full_name}: estimate {peak:,}, real {real:,}")
    return lines


def operators() -> list[Any]:
    """Return PyTorch's operators that take float32, but those that need a card."""
    pytest.importorskip("expecttest", reason="PyTorch's list of operators needs expecttest: pip install expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes and not op.name.startswith("jiterator")]


def test_peaks_of_some_operators() -> None:
    """The estimate is the real peak to the byte, or the operator is listed with the reason."""
    assert not faults(random.Random(0).sample(operators(), SAMPLED))


@pytest.mark.stress
def test_peaks_of_all_operators() -> None:
    """As above, for the whole list."""
    assert not faults(operators())
