"""DataDesc, NDArrayIter and custom iterators in MXNet's style."""

import copy
import pickle

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError, ShapeError


def test_a_description_is_a_pair():
    """A DataDesc unpacks as (name, shape) and compares so; copies and pickles keep dtype and layout."""
    it = mx.io.NDArrayIter({"a": np.ones((6, 2))}, {"b": mx.nd.ones((6,), dtype="int32")}, batch_size=3)
    assert dict(it.provide_data + it.provide_label) == {"a": (3, 2), "b": (3,)}
    net = mx.sym.FullyConnected(mx.sym.Variable("a"), num_hidden=4, name="fc")
    assert net.infer_shape(**dict(it.provide_data))[1] == [(3, 4)]
    (desc,) = it.provide_label
    for duplicate in (desc, copy.deepcopy(desc), pickle.loads(pickle.dumps(desc))):
        assert (duplicate.name, duplicate.shape, duplicate.dtype, duplicate.layout) == ("b", (3,), np.int32, "NCHW")
        assert duplicate == ("b", (3,))
    assert repr(desc) == "DataDesc[b,(3,),int32,NCHW]"


@pytest.mark.parametrize("contexts", [1, 2])
def test_samples_along_another_axis(contexts):
    """A layout such as TNC names the batch axis, along which contexts and shorter batches are split."""
    x = mx.sym.Variable("data")
    net = mx.sym.broadcast_mul(x, mx.sym.Variable("w", shape=(1, 1, 2), init="one"), __layout__="TNC", name="out")
    module = mx.mod.Module(net, label_names=None, context=[mx.cpu(i) for i in range(contexts)])
    module.bind([mx.io.DataDesc("data", (3, 4, 2), layout="TNC")], inputs_need_grad=True)
    module.init_params()
    data = np.arange(24, dtype="float32").reshape(3, 4, 2)
    module.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=True)
    module.backward([mx.nd.array(2 * data)])
    np.testing.assert_array_equal(module.get_outputs()[0].asnumpy(), data)
    np.testing.assert_array_equal(module.get_input_grads()[0].asnumpy(), 2 * data)
    assert module.output_shapes == [("out_output", (3, 4, 2))]
    assert [o.shape for o in module.get_outputs(merge_multi_context=False)[0]] == [(3, 4 // contexts, 2)] * contexts
    module.forward(mx.io.DataBatch([mx.nd.array(data[:, :2])]), is_train=False)  # fewer sentences
    np.testing.assert_array_equal(module.get_outputs()[0].asnumpy(), data[:, :2])
    descs = [mx.io.DataDesc("a", (4, 3), layout="NC"), mx.io.DataDesc("b", (4, 3), layout="TN")]
    two = mx.mod.Module(mx.sym.Variable("a") + mx.sym.Variable("b"), ["a", "b"], None)
    with pytest.raises(ShapeError, match=r"'b' has shape \(4, 3\), expected 4 samples along axis 1"):
        two.bind(descs)


def test_shapes_may_be_set_on_an_iterator():
    """A custom iterator may set provide_data and provide_label as attributes; without them they raise."""

    class Own(mx.io.DataIter):
        def __init__(self):
            super().__init__(2)
            self.provide_data = [("data", (2, 3))]
            self.provide_label = []
            self.left = 2

        def next(self):
            if not self.left:
                raise StopIteration
            self.left -= 1
            return mx.io.DataBatch([mx.nd.ones((2, 3))])

    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1), label_names=None)
    own = Own()
    module.bind(own.provide_data, own.provide_label, for_training=False)
    module.init_params()
    assert module.predict(own).shape == (4, 1)
    with pytest.raises(NotImplementedError, match=r"DataIter\.provide_data"):
        _ = mx.io.DataIter().provide_data
    assert str(mx.io.DataBatch([mx.nd.ones((2, 3))])) == "DataBatch: data shapes: [(2, 3)] label shapes: None"
    shuffled = mx.io.NDArrayIter(np.arange(9.0), batch_size=1, shuffle=True)
    order = shuffled.idx.tolist()
    assert [int(batch.data[0].asscalar()) for batch in shuffled] == order


def test_a_batch_larger_than_the_data():
    """Padding repeats the samples as often as needed, discarding leaves no batch, rolling over and bad sizes raise."""
    it = mx.io.NDArrayIter(np.arange(3.0), np.arange(3.0), batch_size=8)
    (batch,) = it
    assert batch.pad == 5
    assert batch.label[0].asnumpy().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert list(mx.io.NDArrayIter(np.arange(3.0), batch_size=8, last_batch_handle="discard")) == []
    with pytest.raises(ParameterError, match=r"in \[1, 3\]"):
        mx.io.NDArrayIter(np.arange(3.0), batch_size=8, last_batch_handle="roll_over")
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ParameterError, match="batch_size must be an integer"):
            mx.io.NDArrayIter(np.arange(3.0), batch_size=bad)
    with pytest.raises(ParameterError, match="batch_size"):
        mx.io.NDArrayIter(np.ones((0, 2)), batch_size=1)


def test_a_batch_larger_than_the_data_predicts_each_sample_once():
    """``predict`` drops the padding of a batch that is larger than the data."""
    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc"), label_names=None)
    module.bind([("data", (8, 2))], for_training=False)
    module.init_params("one")
    data = np.arange(6.0).reshape(3, 2)
    assert module.predict(mx.io.NDArrayIter(data, batch_size=8)).asnumpy()[:, 0].tolist() == data.sum(1).tolist()


def test_hard_reset():
    """``hard_reset`` drops the samples that would roll over into the next epoch."""
    it = mx.io.NDArrayIter(np.arange(5.0), batch_size=3, last_batch_handle="roll_over")
    assert len(list(it)) == 1
    it.hard_reset()
    assert next(it).data[0].asnumpy().tolist() == [0, 1, 2]


def test_step_by_step():
    """iter_next and the get methods return the batches that ``next`` returns; before iter_next they raise."""
    it = mx.io.NDArrayIter(np.arange(5.0), np.arange(5.0), batch_size=3)
    with pytest.raises(MXNetError, match="no batch yet"):
        it.getdata()
    seen = []
    while it.iter_next():
        seen.append((it.getdata()[0].asnumpy().tolist(), it.getlabel()[0].shape, it.getpad(), it.getindex().tolist()))
    assert seen == [([0, 1, 2], (3,), 0, [0, 1, 2]), ([3, 4, 0], (3,), 1, [3, 4, 0])]


class Counting(mx.io.DataIter):
    """A custom iterator over three batches that defines iter_next and getdata; ``getpad`` returns None."""

    def __init__(self):
        super().__init__(2)
        self.at = -1

    @property
    def provide_data(self):
        return [("data", (2, 1))]

    @property
    def provide_label(self):
        return []

    def reset(self):
        self.at = -1

    def iter_next(self):
        self.at += 1
        return self.at < 3

    def getdata(self):
        return [mx.nd.ones((2, 1)) * self.at]

    def getpad(self):
        return None


def test_custom_iterator():
    """``predict`` and ``score`` accept an iterator without getlabel; a pad of None means no padding."""
    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc"), label_names=None)
    module.bind(Counting().provide_data, label_shapes=module._label_shapes, for_training=False)
    module.init_params("one")
    assert (module._label_shapes, module._data_shapes) == (None, module.data_shapes)
    assert module.predict(Counting()).asnumpy().ravel().tolist() == [0, 0, 1, 1, 2, 2]
    assert module.score(Counting(), "loss") == [("loss", 1.0)]


def test_names_of_arrays_in_a_list():
    """NDArrayIter names the arrays of a list as MXNet does: ``_0_data``, ``_1_data``."""
    arrays = [np.zeros((4, 2)), np.ones((4, 3))]
    it = mx.io.NDArrayIter(arrays, arrays, batch_size=2)
    assert [desc.name for desc in it.provide_data] == ["_0_data", "_1_data"]
    assert [desc.name for desc in it.provide_label] == ["_0_softmax_label", "_1_softmax_label"]


@pytest.mark.parametrize("array", [mx.nd.ones((2, 3)), np.ones((2, 3))])
def test_a_batch_is_of_lists(array):
    """DataBatch refuses an array in place of a list of arrays."""
    with pytest.raises(ParameterError, match=r"data must be a list of arrays, got one array; write \[data\]"):
        mx.io.DataBatch(array)
    with pytest.raises(ParameterError, match=r"DataBatch: label must be a list of arrays"):
        mx.io.DataBatch([array], label=array)
