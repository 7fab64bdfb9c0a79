"""A leftover MXNet model: a symbol file and a parameter file, opened, checked and run without MXNet.

    python examples/leftover_model.py

The pair is written here first, in MXNet's formats, so that the example needs no download.
"""

import tempfile
from pathlib import Path

import numpy as np

import weftplan as mx

folder = Path(tempfile.mkdtemp())
made = mx.mod.Module(mx.models.digits("lenet"))
made.bind([("data", (4, 1, 8, 8))], [("softmax_label", (4,))])
made.init_params(mx.init.Xavier())
made.save_checkpoint(folder / "leftover", 7)

symbol, arguments, states = mx.model.load_checkpoint(folder / "leftover", 7)
print(f"{len(arguments)} parameters, {len(states)} auxiliary states, outputs {symbol.list_outputs()}")
mx.viz.print_summary(symbol, {"data": (1, 1, 8, 8)}, line_length=80)
print(symbol.plan(data=(1, 1, 8, 8), train=False).summary(3).splitlines()[1].strip())

module = mx.mod.Module(symbol, label_names=None)
module.bind([("data", (4, 1, 8, 8))], for_training=False)
module.set_params(arguments, states)
images = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
classes = module.predict(images).asnumpy().argmax(axis=1)
print(f"classes {classes.tolist()}")
assert np.array_equal(classes, made.predict(images).asnumpy().argmax(axis=1))
