"""Generator of ``data/images.npz``: MXNet 1.9.1's results for ``image_cases.py``.

Run it with the Python of an environment that has MXNet 1.9.1 (see README.md):

    python tests/golden/images.py
"""

import pathlib
import sys
import tempfile

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

if __name__ == "__main__":
    import image_cases
    import mxnet

    results = {f"images/{key}": value for key, value in image_cases.images(mxnet).items()}
    with tempfile.TemporaryDirectory() as folder:
        results.update({f"records/{key}": value for key, value in image_cases.records(mxnet, folder).items()})
    target = FOLDER / "data" / "images.npz"
    np.savez_compressed(target, **results)
    print(f"{len(results)} arrays, {target.stat().st_size:,} bytes in {target}")
