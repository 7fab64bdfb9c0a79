"""MXNet's NumPy operators in exported Gluon networks: ``_np_*``, ``_npi_*`` and ``_npx_*``.

Most are operators of :mod:`weftplan.ops` under other names, with other parameters or other dtype rules.
Behaviour that Gluon networks do not use (integers that become floats, shapes of size 0, extensions of mx.np) raises an
error that names it.
"""
