"""Elementwise operators of MXNet's NumPy interface.

Most are other operators of :mod:`weftplan.ops` under a new name. Comparisons return booleans. Division, whose result
would be float in NumPy, refuses integers.
"""

from __future__ import annotations

from weftplan.ops.contrib.numpy.derive import derive
from weftplan.ops.core.expression import f
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.formula_kernel import FormulaKernel, ufunc_kernel
from weftplan.ops.core.kernels import BOOL
from weftplan.ops.core.params import p_dtype, p_float, p_optional, p_str
from weftplan.ops.core.registry import get, register
from weftplan.ops.core.rules import DTypes, broadcast_shape, floats_only, merge_dtype, same_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.ops.elementwise.binary import SCALAR
from weftplan.support.array_types import ArrayModule, RawArray

for _name in ("exp", "expm1", "log", "log10", "log2", "log1p", "sqrt", "cbrt", "square", "sin", "cos", "tan", "arcsin",
              "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "degrees", "radians",
              "negative", "reciprocal", "sign", "ceil", "floor", "trunc", "fix", "rint"):  # fmt: skip
    derive(f"_npi_{_name}", _name, inputs=("x",))
derive("_npi_absolute", "abs", inputs=("x",), aliases=("_npi_abs",))
for _name in ("relu", "sigmoid", "erf", "erfinv", "gamma", "gammaln"):
    derive(f"_npx_{_name}", _name)
derive("_np_copy", "_copy", inputs=("a",), aliases=("_npi_copy",))
derive("_npi_clip", "clip")

for _name, _word in (
    ("add", "add"), ("subtract", "sub"), ("multiply", "mul"), ("true_divide", "div"), ("mod", "mod"),
    ("power", "power"), ("hypot", "hypot"), ("maximum", "maximum"), ("minimum", "minimum"),
):  # fmt: skip
    _right, _left = get(f"broadcast_{_word}").with_number
    _bases = {f"_npi_{_name}": f"broadcast_{_word}", f"_npi_{_name}_scalar": _right}
    if _left != _right:
        _bases[f"_npi_r{_name}_scalar"] = _left
    for _derived, _base in _bases.items():
        derive(
            _derived,
            _base,
            infer_dtype=floats_only(_derived) if _word == "div" else None,
            doc="lhs / rhs of floats. Shapes broadcast." if _derived == "_npi_true_divide" else "",
        )


# ---------------------------------------------------------------------------------------------------------- comparisons


def _bool_out(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    merged = None
    for position, dtype in enumerate(ins):
        merged = merge_dtype(merged, dtype, f"input {position} of a comparison, and those before it")
    return [merged] * len(ins), [merge_dtype(BOOL, outs[0], "output of a comparison, which is bool")]


for _name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
    _compare = getattr(f, _name)
    register(
        Op(
            name=f"_npi_{_name}",
            forward=ufunc_kernel(_name, 2),
            infer_shape=broadcast_shape,
            infer_dtype=_bool_out,
            inputs=("lhs", "rhs"),
            gradient=zero_gradient,
            doc=f"{_name}(lhs, rhs) as bool. Shapes broadcast.",
        )
    )
    register(
        Op(
            name=f"_npi_{_name}_scalar",
            forward=FormulaKernel(lambda p, x, compare=_compare: compare(x, p.scalar)),
            infer_shape=same_shape,
            infer_dtype=_bool_out,
            params=SCALAR,
            gradient=zero_gradient,
            doc=f"{_name}(data, scalar) as bool.",
        )
    )
register(
    Op(
        name="_npi_logical_not",
        forward=ufunc_kernel("logical_not", 1),
        infer_shape=same_shape,
        infer_dtype=_bool_out,
        inputs=("x",),
        gradient=zero_gradient,
        doc="True where x is 0, as bool.",
    )
)


# -------------------------------------------------------------------------------------------------------------- filling


def _like_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    target = params["dtype"] if params["dtype"] is not None else ins[0]
    return ins, [merge_dtype(target, outs[0], "output of _npi_full_like")]


@kernel
def _full_like(xp: ArrayModule, p: Params, a: RawArray | None, out: RawArray) -> None:
    out.fill(p["fill_value"])


register(
    Op(
        name="_npi_full_like",
        forward=_full_like,
        infer_shape=same_shape,
        infer_dtype=_like_dtype,
        params=(
            Param("fill_value", p_float, doc="the number"),
            Param("ctx", p_str, "", "accepted, no effect: the context is that of a"),
            Param("dtype", p_optional(p_dtype), None, "dtype; None: that of a"),
        ),
        inputs=("a",),
        gradient=zero_gradient,
        ignored_inputs=(0,),
        doc="A tensor full of fill_value, in the shape of a.",
    )
)
for _name in ("zeros", "ones", "full", "arange"):
    derive(f"_npi_{_name}", f"_{_name}")
