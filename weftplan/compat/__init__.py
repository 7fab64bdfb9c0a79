"""MXNet's names for what stands elsewhere here: ``mx.base``, ``mx.util``, ``mx.runtime``, ``mx.contrib``, ``mx.log``.

Nothing in weftplan imports this package; scripts written for MXNet do.
"""
