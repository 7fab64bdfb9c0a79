"""Operators: what one node of a graph computes. Importing this package registers all of them.

The table is :mod:`weftplan.ops.registry`; the contract of a kernel is :mod:`weftplan.ops.schema`.
"""

import weftplan.ops.add_n
import weftplan.ops.allclose
import weftplan.ops.amp
import weftplan.ops.argmax
import weftplan.ops.binary
import weftplan.ops.blocks_of_space
import weftplan.ops.clip
import weftplan.ops.compiled
import weftplan.ops.cuda.offered
import weftplan.ops.cumsum
import weftplan.ops.detection
import weftplan.ops.diagonal
import weftplan.ops.expand
import weftplan.ops.filling
import weftplan.ops.gather_nd
import weftplan.ops.grids
import weftplan.ops.histogram
import weftplan.ops.image
import weftplan.ops.index_array
import weftplan.ops.index_copy
import weftplan.ops.indexing
import weftplan.ops.join
import weftplan.ops.khatri_rao
import weftplan.ops.linalg_diagonals
import weftplan.ops.linalg_lq
import weftplan.ops.linalg_lu
import weftplan.ops.linalg_products
import weftplan.ops.linalg_solve
import weftplan.ops.marking
import weftplan.ops.matrix
import weftplan.ops.moments
import weftplan.ops.nan_reduce
import weftplan.ops.nn
import weftplan.ops.norm
import weftplan.ops.numpy
import weftplan.ops.ordering
import weftplan.ops.quadratic
import weftplan.ops.quantize
import weftplan.ops.random
import weftplan.ops.random_more
import weftplan.ops.random_pdf
import weftplan.ops.raveling
import weftplan.ops.reduce
import weftplan.ops.scalar
import weftplan.ops.shape
import weftplan.ops.sizes
import weftplan.ops.slicing
import weftplan.ops.special
import weftplan.ops.split_v2
import weftplan.ops.sync_batch_norm
import weftplan.ops.unary
import weftplan.ops.update
import weftplan.ops.update_adamw
import weftplan.ops.update_groups
import weftplan.ops.update_many
import weftplan.ops.update_mixed
import weftplan.ops.update_more
import weftplan.ops.where
import weftplan.ops.zipfian  # noqa: F401
