"""Shape operators, matrix products and ``_npx`` layers of MXNet's NumPy interface."""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.numpy.derive import derive
from weftplan.ops.core.params import p_bool, p_enum, p_int, p_optional, p_shape
from weftplan.ops.core.registry import get
from weftplan.ops.core.rules import Shapes, merge_shape
from weftplan.ops.core.schema import Param, Params, ShapeRule
from weftplan.ops.elementwise.add_n import NUM_ARGS

for _name, _base in (
    ("_npi_expand_dims", "expand_dims"), ("_npi_stack", "stack"), ("_npi_split", "_split_v2"), ("_npi_slice", "slice"),
    ("_npi_take", "take"), ("_npi_swapaxes", "SwapAxis"), ("_npi_flip", "reverse"), ("_npi_tile", "tile"),
    ("_npi_cast", "Cast"), ("_npi_where", "where"), ("_npi_sort", "sort"), ("_npi_argsort", "argsort"),
    ("_npi_gather_nd", "gather_nd"), ("_npi_rnn_param_concat", "_rnn_param_concat"),
    ("_npx_activation", "Activation"), ("_npx_arange_like", "_contrib_arange_like"), ("_npx_batch_dot", "batch_dot"),
    ("_npx_batch_flatten", "Flatten"), ("_npx_batch_norm", "BatchNorm"), ("_npx_cast", "Cast"),
    ("_npx_convolution", "Convolution"), ("_npx_deconvolution", "Deconvolution"), ("_npx_dropout", "Dropout"),
    ("_npx_embedding", "Embedding"), ("_npx_fully_connected", "FullyConnected"), ("_npx_gather_nd", "gather_nd"),
    ("_npx_group_norm", "GroupNorm"), ("_npx_instance_norm", "InstanceNorm"), ("_npx_layer_norm", "LayerNorm"),
    ("_npx_leaky_relu", "LeakyReLU"), ("_npx_log_softmax", "log_softmax"), ("_npx_one_hot", "one_hot"),
    ("_npx_pick", "pick"), ("_npx_pooling", "Pooling"), ("_npx_reshape_like", "reshape_like"), ("_npx_rnn", "RNN"),
    ("_npx_roi_pooling", "ROIPooling"), ("_npx_sequence_mask", "SequenceMask"), ("_npx_shape_array", "shape_array"),
    ("_npx_slice", "slice"), ("_npx_smooth_l1", "smooth_l1"), ("_npx_softmax", "softmax"), ("_npx_topk", "topk"),
    ("_npx_multibox_prior", "_contrib_MultiBoxPrior"), ("_npx_multibox_target", "_contrib_MultiBoxTarget"),
    ("_npx_multibox_detection", "_contrib_MultiBoxDetection"),
):  # fmt: skip
    derive(_name, _base)
derive("_np_squeeze", "squeeze", inputs=("a",), aliases=("_npi_squeeze",))
derive("_np_repeat", "repeat", aliases=("_npi_repeat",))
derive("_np_cumsum", "cumsum", aliases=("_npi_cumsum",))

derive(
    "_np_transpose",
    "transpose",
    inputs=("a",),
    params=(Param("axes", p_optional(p_shape), None, "input axis of each output axis; None: reversed"),),
    translate=lambda params: {"axes": params["axes"] or ()},
    aliases=("_npi_transpose",),
)


def _join_axis(params: Params) -> Params:
    return {"num_args": params["num_args"], "dim": params["dim"] if params["axis"] is None else params["axis"]}


derive(
    "_npi_concatenate",
    "Concat",
    params=(
        NUM_ARGS,
        Param("axis", p_optional(p_int), None, "axis along which the inputs are joined; None: dim"),
        Param("dim", p_int, 0, "the same"),
    ),
    translate=_join_axis,
)

# ------------------------------------------------------------------------------------------------------------- reshape

_ORDER = Param("order", p_enum("C"), "C", "order of the elements")
_CODES = {-1: (-1,), -2: (0,), -4: (-2,), -5: (-3,)}
"""Codes of npx.reshape, with the equivalent codes of Reshape."""


def _plain(params: Params) -> Params:
    sizes = params["newshape"]
    if any(size < -1 or size == 0 for size in sizes):
        raise ParameterError(f"_np_reshape: newshape={sizes}: expected positive sizes, of which one may be -1")
    return {"shape": sizes, "reverse": False, "target_shape": (), "keep_highest": False}


def _coded(params: Params) -> Params:
    codes: list[int] = []
    newshape = params["newshape"]
    position = 0
    while position < len(newshape):
        code = newshape[position]
        if code == -6:
            codes += [-4, *newshape[position + 1 : position + 3]]
            position += 2
        elif code == -3 or code < -6 or code == 0:
            raise ParameterError(
                f"_npx_reshape: newshape={newshape}: code {code} is not supported, expected positive sizes, -1, -2, "
                f"-4, -5, or -6 with two sizes"
            )
        else:
            codes += _CODES.get(code, (code,))
        position += 1
    return {"shape": tuple(codes), "reverse": params["reverse"], "target_shape": (), "keep_highest": False}


_NEWSHAPE = Param("newshape", p_shape, doc="sizes and special codes")
derive(
    "_np_reshape",
    "Reshape",
    inputs=("a",),
    params=(_NEWSHAPE, _ORDER),
    translate=_plain,
    aliases=("_npi_reshape",),
    doc="The same elements in another shape.",
)
derive(
    "_npx_reshape",
    "Reshape",
    inputs=("a",),
    params=(_NEWSHAPE, Param("reverse", p_bool, False, "match the codes from the right"), _ORDER),
    translate=_coded,
    doc="The same elements in another shape; -1: inferred, -2: kept, -4: all the rest, -5: two joined, -6: one split.",
)

# ------------------------------------------------------------------------------------------------------------ products


def _product_shape(name: str, base: str, ranks: Sequence[int], options: Params) -> ShapeRule:
    """Return a rule that applies the shape rule of ``base`` to tensors of ``ranks`` and refuses other ranks."""

    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        for shape in ins:
            if shape is not None and len(shape) not in ranks:
                raise ShapeError(
                    f"{name} of shapes {ins[0]} and {ins[1]}: expected tensors of {' or '.join(map(str, ranks))} "
                    f"dimensions each"
                )
        new_ins, new_outs = get(base).infer_shape(options, ins, [None if out == () else out for out in outs])
        if len(ins[0] or ()) == 1 == len(ins[1] or ()):
            return [*new_ins], [merge_shape((), outs[0], f"output of {name} of two vectors")]
        return [*new_ins], [*new_outs]

    return infer


_DOT = {"transpose_a": False, "transpose_b": False, "forward_stype": None}
derive(
    "_np_dot",
    "dot",
    inputs=("a", "b"),
    params=(),
    translate=lambda params: _DOT,
    infer_shape=_product_shape("_np_dot", "dot", (1, 2), _DOT),
    aliases=("_npi_dot",),
    doc="The product of two matrices or vectors.",
)
_MATMUL = {"transpose_a": False, "transpose_b": False, "forward_stype": None}
derive(
    "_npi_matmul",
    "batch_dot",
    inputs=("a", "b"),
    params=(),
    translate=lambda params: _MATMUL,
    infer_shape=_product_shape("_npi_matmul", "batch_dot", (3,), _MATMUL),
    doc="The products of matrices in stacks of three dimensions.",
)
