"""A trace: record four training steps, and show the recording as a table and as a page.

python examples/read_a_trace.py            # writes lanes.html into the current folder
"""

from pathlib import Path

import numpy as np

import weftplan as mx

rng = np.random.default_rng(0)
batches = mx.io.NDArrayIter(rng.random((128, 1, 8, 8), dtype=np.float32), rng.integers(0, 10, 128), batch_size=32)
module = mx.mod.Module(mx.models.digits("lenet"), context=[mx.cpu(0), mx.cpu(1)])
module.fit(batches, kvstore="device", num_epoch=1)

mx.profiler.set_state("run")
batches.reset()
for batch in batches:
    module.forward_backward(batch)
    module.update()
mx.profiler.set_state("stop")

print(mx.profiler.dumps(sort_by="total"))
page = Path("lanes.html")
page.write_text(mx.profiler.to_html(title="four training steps"), encoding="utf-8")
print(f"{page}: open it in a browser; a lane is a worker, a colour is a kind of work, and gaps are waits")
