"""MXNet's module names: ``mx.base``, ``mx.util``, ``mx.runtime``, ``mx.contrib`` and others.

They map to modules with other names here. Nothing in weftplan imports this package; scripts written for MXNet do.
"""
