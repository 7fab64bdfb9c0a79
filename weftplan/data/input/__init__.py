"""Parts of ``mx.io.DatasetIter``: batches from any dataset, read inline or by worker processes.

The modules that workers import (``sources``, ``layout``, ``seeding``, ``sample_reader``, ``slots``, ``worker_loop``)
depend on NumPy only, not on the package's arrays, engine or storage. This keeps worker start-up fast.
"""
