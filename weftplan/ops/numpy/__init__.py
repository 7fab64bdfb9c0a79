"""MXNet's NumPy operators in exported Gluon networks: ``_np_*``, ``_npi_*`` and ``_npx_*``.

Most are operators of this package under other names, with other parameters or other rules for dtypes; importing this
package registers them. Behaviour that Gluon networks do not use (integers that become floats, shapes of size 0,
extensions of mx.np) is refused by name.
"""

import weftplan.ops.numpy.arithmetic
import weftplan.ops.numpy.reduce
import weftplan.ops.numpy.shape  # noqa: F401
