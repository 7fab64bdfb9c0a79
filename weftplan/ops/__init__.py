"""Operators: the computations of graph nodes. Importing this package registers all of them.

The table is :mod:`weftplan.ops.core.registry`; the contract of a kernel is :mod:`weftplan.ops.core.schema`.
"""

import weftplan.ops.amp
import weftplan.ops.compiled
import weftplan.ops.creation.arange_like
import weftplan.ops.creation.filling
import weftplan.ops.cuda.offered
import weftplan.ops.detection
import weftplan.ops.elementwise.add_n
import weftplan.ops.elementwise.allclose
import weftplan.ops.elementwise.binary
import weftplan.ops.elementwise.clip
import weftplan.ops.elementwise.quadratic
import weftplan.ops.elementwise.scalar
import weftplan.ops.elementwise.special
import weftplan.ops.elementwise.unary
import weftplan.ops.elementwise.where
import weftplan.ops.image
import weftplan.ops.indexing.fill_element_0index
import weftplan.ops.indexing.gather_nd
import weftplan.ops.indexing.index_array
import weftplan.ops.indexing.index_copy
import weftplan.ops.indexing.take
import weftplan.ops.linalg.diagonals
import weftplan.ops.linalg.khatri_rao
import weftplan.ops.linalg.lq
import weftplan.ops.linalg.lu
import weftplan.ops.linalg.matrix
import weftplan.ops.linalg.products
import weftplan.ops.linalg.solve
import weftplan.ops.nn
import weftplan.ops.numpy
import weftplan.ops.optimizer.adamw
import weftplan.ops.optimizer.lamb
import weftplan.ops.optimizer.mixed_precision
import weftplan.ops.optimizer.multi_lars
import weftplan.ops.optimizer.multi_sgd
import weftplan.ops.optimizer.sgd_adam
import weftplan.ops.optimizer.variants
import weftplan.ops.quantize
import weftplan.ops.random.densities
import weftplan.ops.random.distributions
import weftplan.ops.random.draws
import weftplan.ops.random.zipfian
import weftplan.ops.reduction.argmax
import weftplan.ops.reduction.cumsum
import weftplan.ops.reduction.histogram
import weftplan.ops.reduction.moments
import weftplan.ops.reduction.nan_reduce
import weftplan.ops.reduction.norm
import weftplan.ops.reduction.ordering
import weftplan.ops.reduction.reduce
import weftplan.ops.shape.broadcast
import weftplan.ops.shape.concat
import weftplan.ops.shape.depth_to_space
import weftplan.ops.shape.diagonal
import weftplan.ops.shape.ravel_index
import weftplan.ops.shape.reshape
import weftplan.ops.shape.shape_of
import weftplan.ops.shape.slicing
import weftplan.ops.shape.split_v2
import weftplan.ops.sync_batch_norm  # noqa: F401
