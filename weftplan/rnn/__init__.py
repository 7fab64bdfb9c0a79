"""``mx.rnn``: recurrent cells as symbols, unrolling, bucketed sentences, checkpoints.

>>> import weftplan as mx
>>> outputs, states = mx.rnn.LSTMCell(8, prefix="l0_").unroll(3, mx.sym.Variable("data"), merge_outputs=True)
>>> outputs.infer_shape(data=(2, 3, 5))[1]
[(2, 3, 8)]
"""

from weftplan.rnn import sentences as io
from weftplan.rnn.base import BaseRNNCell, RNNParams
from weftplan.rnn.cells import GRUCell, LSTMCell, RNNCell
from weftplan.rnn.checkpoints import do_rnn_checkpoint, load_rnn_checkpoint, save_rnn_checkpoint
from weftplan.rnn.containers import BidirectionalCell, SequentialRNNCell
from weftplan.rnn.convolutional import BaseConvRNNCell, ConvGRUCell, ConvLSTMCell, ConvRNNCell
from weftplan.rnn.fused import FusedRNNCell
from weftplan.rnn.modifiers import DropoutCell, ModifierCell, ResidualCell, ZoneoutCell
from weftplan.rnn.sentences import BucketSentenceIter, encode_sentences

__all__ = [
    "BaseConvRNNCell",
    "BaseRNNCell",
    "BidirectionalCell",
    "BucketSentenceIter",
    "ConvGRUCell",
    "ConvLSTMCell",
    "ConvRNNCell",
    "DropoutCell",
    "FusedRNNCell",
    "GRUCell",
    "LSTMCell",
    "ModifierCell",
    "RNNCell",
    "RNNParams",
    "ResidualCell",
    "SequentialRNNCell",
    "ZoneoutCell",
    "do_rnn_checkpoint",
    "encode_sentences",
    "io",
    "load_rnn_checkpoint",
    "save_rnn_checkpoint",
]


def __dir__() -> list[str]:
    return sorted(__all__)
