"""Compiled kernels: alternative implementations of operators, as LLVM IR compiled on first use.

Importing this package registers them (:mod:`weftplan.ops.core.implementations`); llvmlite is imported when a plan first
checks whether they can be used. A kernel's results have the same bits at every vector width. Threads that share an
operation synchronize through functions compiled in this package.
"""

import weftplan.ops.compiled.batch_norm.implementation
import weftplan.ops.compiled.convolution.implementation
import weftplan.ops.compiled.depthwise.block
import weftplan.ops.compiled.fully_connected
import weftplan.ops.compiled.pooling.implementation
import weftplan.ops.compiled.shared_gradient
import weftplan.ops.compiled.softmax  # noqa: F401
from weftplan.ops.compiled.exchange import polling
from weftplan.support import slots

slots.POLLING.fill(polling.look)
