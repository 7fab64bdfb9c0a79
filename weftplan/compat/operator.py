"""``mx.operator``: operators written in Python, with MXNet's current and older interfaces."""

from weftplan.compat.custom_operators import (
    CustomOp,
    CustomOpProp,
    OperatorArguments,
    get_all_registered_operators,
    get_operator_arguments,
    register,
)
from weftplan.compat.python_ops import NDArrayOp, NumpyOp, PythonOp

__all__ = [
    "CustomOp",
    "CustomOpProp",
    "NDArrayOp",
    "NumpyOp",
    "OperatorArguments",
    "PythonOp",
    "get_all_registered_operators",
    "get_operator_arguments",
    "register",
]
