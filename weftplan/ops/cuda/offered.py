"""Imports every file that offers kernels for GPUs, so that :mod:`weftplan.ops.core.implementations` knows them.

It is imported with the operators, on any machine: none of these files needs a GPU before a kernel is asked for.
"""

import weftplan.ops.cuda.batch_norm
import weftplan.ops.cuda.columns
import weftplan.ops.cuda.convolution
import weftplan.ops.cuda.ctc_loss
import weftplan.ops.cuda.dropout
import weftplan.ops.cuda.indexing
import weftplan.ops.cuda.layer_norm
import weftplan.ops.cuda.pointwise
import weftplan.ops.cuda.pooling
import weftplan.ops.cuda.roi_pooling
import weftplan.ops.cuda.sampling
import weftplan.ops.cuda.sequence
import weftplan.ops.cuda.softmax
import weftplan.ops.cuda.updates  # noqa: F401
