"""Neural-network operators. Importing this package registers all of them."""

import weftplan.ops.nn.activation
import weftplan.ops.nn.convolution
import weftplan.ops.nn.fully_connected
import weftplan.ops.nn.pooling  # noqa: F401
