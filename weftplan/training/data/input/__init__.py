"""Batches from any dataset, read by this process or by workers: what ``mx.io.DatasetIter`` is made of.

What workers import (``sources``, ``layout``, ``seeding``, ``reading``, ``slots``, ``worker``) needs NumPy and no array,
engine or storage of the package, so that they start quickly.
"""
