"""Operators: what one node of a graph computes. Importing this package registers all of them.

The table is :mod:`weftplan.ops.registry`; the contract of a kernel is :mod:`weftplan.ops.schema`.
"""

import weftplan.ops.binary
import weftplan.ops.filling
import weftplan.ops.join
import weftplan.ops.nn
import weftplan.ops.reduce
import weftplan.ops.scalar
import weftplan.ops.shape
import weftplan.ops.unary  # noqa: F401
