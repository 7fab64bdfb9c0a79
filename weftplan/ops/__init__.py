"""Operators: the computations of graph nodes.

:mod:`weftplan.ops.core.registry` finds an operator by its name and imports its module then; the contract of a kernel is
:mod:`weftplan.ops.core.schema`.
"""
