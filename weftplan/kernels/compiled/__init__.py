"""Compiled kernels: alternative implementations of operators, as LLVM IR compiled on first use.

Importing a module registers its kernels (:mod:`weftplan.ops.core.implementations`); llvmlite is imported when a plan
first checks whether they can be used. A kernel's results have the same bits at every vector width. Threads that share
an operation synchronize through functions compiled in this package.
"""
