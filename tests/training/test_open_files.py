"""Record files that a program never closes, in child processes: the data is on disk however the program ends."""

import subprocess
import sys

import pytest

import weftplan as mx

ENDS = {
    "the end of the module": "",
    "an exception": "raise ValueError('on purpose')",
    "sys.exit": "import sys; sys.exit(3)",
    "a reference cycle": "cycle = [writer, plain]; cycle.append(cycle); del writer, plain",
    "a forked child that ends first": "import os; pid = os.fork()\nif not pid: raise SystemExit\nos.waitpid(pid, 0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_records_and_index_after_every_end(tmp_path, end):
    """Records and index are whole; a forked child writes neither."""
    index, records, others = (tmp_path / name for name in ("a.idx", "a.rec", "b.rec"))
    program = f"""
import weftplan as mx
writer = mx.recordio.MXIndexedRecordIO({str(index)!r}, {str(records)!r}, "w")
plain = mx.recordio.MXRecordIO({str(others)!r}, "w")
for k in range(3):
    writer.write_idx(k, b"record %d" % k)
    plain.write(b"record %d" % k)
{ENDS[end]}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=False)
    read = mx.recordio.MXIndexedRecordIO(str(index), str(records), "r")
    assert [read.read_idx(k) for k in range(3)] == [b"record 0", b"record 1", b"record 2"]
    read.close()
    read = mx.recordio.MXRecordIO(str(others), "r")
    assert [read.read() for _ in range(4)] == [b"record 0", b"record 1", b"record 2", None]
    read.close()
