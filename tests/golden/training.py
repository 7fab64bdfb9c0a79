"""Generator of ``data/training.npz``: MXNet 1.9.1's results for every case of ``training_cases.py``.

Run it with the Python of an environment that has MXNet 1.9.1 (see README.md):

    python tests/golden/training.py
"""

import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

if __name__ == "__main__":
    import mxnet
    import sequence_cases
    import training_cases

    results = training_cases.run(mxnet)
    for group in (sequence_cases.unrolls, sequence_cases.file_orders):
        results.update({f"{group.__name__}/{key}": value for key, value in group(mxnet).items()})
    target = FOLDER / "data" / "training.npz"
    np.savez_compressed(target, **{key: np.asarray(value, np.float32) for key, value in results.items()})
    print(f"{len(results)} arrays, {target.stat().st_size:,} bytes in {target}")
