"""Generator of ``data/kvstore.npz``: MXNet 1.9.1's results for every case of ``kvstore_cases.py``.

Run it with the Python of an environment that has MXNet 1.9.1 (see README.md):

    python tests/golden/kvstore.py
"""

import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

if __name__ == "__main__":
    import kvstore_cases
    import mxnet

    results = kvstore_cases.run(mxnet)
    target = FOLDER / "data" / "kvstore.npz"
    np.savez_compressed(target, **results)
    print(f"{len(results)} arrays, {target.stat().st_size:,} bytes in {target}")
