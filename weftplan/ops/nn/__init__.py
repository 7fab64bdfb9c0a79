"""Neural-network operators, one module per family.

Importing this package registers every operator.
"""

import weftplan.ops.nn.activation
import weftplan.ops.nn.attention
import weftplan.ops.nn.batch_norm
import weftplan.ops.nn.columns
import weftplan.ops.nn.convolution
import weftplan.ops.nn.correlation
import weftplan.ops.nn.crop
import weftplan.ops.nn.ctc_loss
import weftplan.ops.nn.deconvolution
import weftplan.ops.nn.deformable_convolution
import weftplan.ops.nn.dropout
import weftplan.ops.nn.embedding
import weftplan.ops.nn.fully_connected
import weftplan.ops.nn.group_norm
import weftplan.ops.nn.kl_sparse
import weftplan.ops.nn.l2_normalization
import weftplan.ops.nn.layer_norm
import weftplan.ops.nn.leaky_relu
import weftplan.ops.nn.losses
import weftplan.ops.nn.lrn
import weftplan.ops.nn.pooling
import weftplan.ops.nn.resize
import weftplan.ops.nn.rnn
import weftplan.ops.nn.roi_pooling
import weftplan.ops.nn.sequence
import weftplan.ops.nn.softmax
import weftplan.ops.nn.softmax_cross_entropy
import weftplan.ops.nn.softmax_output
import weftplan.ops.nn.spatial_transformer
import weftplan.ops.nn.svm_output
import weftplan.ops.nn.upsampling  # noqa: F401
