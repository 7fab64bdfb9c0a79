"""Import every module that registers kernels for GPUs with :mod:`weftplan.ops.core.implementations`.

The operators import this module on every machine, because none of these modules needs a GPU at import.
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
