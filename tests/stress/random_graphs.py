"""Random networks of about 150 operators, and option sets for planning them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import weftplan as mx
from weftplan.errors import MXNetError
from weftplan.planner import PlanOptions

sym = mx.sym


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


UNARY = words("""
    relu sigmoid tanh softsign hard_sigmoid erf abs sign negative square exp expm1 log log10 log2 log1p sqrt
    rsqrt cbrt rcbrt reciprocal sin cos tan arcsin arccos arctan sinh cosh arcsinh arccosh arctanh degrees
    radians round rint floor ceil trunc fix logical_not gamma gammaln erfinv zeros_like ones_like BlockGrad
    identity make_loss MakeLoss Flatten softmax softmin log_softmax L2Normalization cumsum argsort sort argmax
    argmin sum mean max min prod nansum nanprod norm reverse transpose shape_array size_array diag
""")
PAIRS = words("""
    elemwise_add elemwise_sub elemwise_mul elemwise_div _maximum _minimum _hypot _power _mod _equal _not_equal
    _greater _greater_equal _lesser _lesser_equal _logical_and _logical_or _logical_xor reshape_like
    broadcast_like slice_like _identity_with_attr_like_rhs LinearRegressionOutput MAERegressionOutput
    LogisticRegressionOutput
""")
BROADCAST = words("""
    add sub mul div maximum minimum hypot power mod equal not_equal greater greater_equal lesser lesser_equal
    logical_and logical_or logical_xor
""")
ACTIVATIONS = ("relu", "sigmoid", "tanh", "softrelu", "softsign")
LEAKY = ("leaky", "elu", "selu", "gelu", "prelu", "rrelu")


class Maker:
    """Builder of one random graph; operators that refuse their inputs are skipped.

    ``inputs`` are the shapes of its variables; ``most_elements`` limits the size of every array.
    """

    inputs: ClassVar[dict[str, tuple[int, ...]]] = {"x0": (4, 6), "x1": (4, 6), "x2": (2, 4, 6, 6), "x3": (3, 4, 8)}
    most_elements = 4096

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shapes = dict(self.inputs)
        self.pool: list[tuple[Any, tuple[int, ...]]] = [(sym.Variable(n), s) for n, s in self.shapes.items()]
        self.count = 0

    def graph(self, size: int) -> Any:
        """Return a symbol of about ``size`` operators, with one to four outputs."""
        for _ in range(4 * size):
            if self.count >= size:
                break
            self._grow()
        heads = [self.pool[-1][0], *(self.rng.choice(self.pool)[0] for _ in range(self.rng.randrange(4)))]
        return sym.Group(heads)

    def _pick(self, rank: int | None = None) -> tuple[Any, tuple[int, ...]]:
        pool = [item for item in self.pool if rank is None or len(item[1]) == rank] or self.pool
        return pool[max(0, len(pool) - 1 - int(self.rng.expovariate(0.35)))]

    def _like(self, shape: tuple[int, ...]) -> Any:
        return self.rng.choice([s for s, second in self.pool if second == shape])

    def _grow(self) -> None:
        name = f"n{self.count}"
        try:
            symbol = self._make(name)
            if symbol is None:
                return
            outputs = list(symbol) if self.rng.random() < 0.8 else list(symbol)[:1]
            shapes = {n: self.shapes[n] for n in symbol.list_arguments() if n in self.shapes}
            inferred = symbol.infer_shape_partial(**shapes)[1]
            symbol.infer_type_partial(**dict.fromkeys(shapes, "float32"))
        except (MXNetError, ValueError, TypeError):
            return
        if not all(shape and 0 not in shape and _size(shape) <= self.most_elements for shape in inferred):
            return
        self.count += 1
        chosen = list(zip(outputs, inferred, strict=False))
        self.rng.shuffle(chosen)
        # Unused outputs are intended.
        self.pool += chosen[: self.rng.randrange(1, len(chosen) + 1)]

    def _make(self, name: str) -> Any:
        rng = self.rng
        kind = rng.randrange(14)
        if kind < 3:
            return getattr(sym, rng.choice(UNARY))(self._pick()[0], name=name)
        if kind < 5:
            x, shape = self._pick()
            return getattr(sym, rng.choice(PAIRS))(x, self._like(shape), name=name)
        if kind == 5:
            x, y = self._pick()[0], self._pick()[0]
            return getattr(sym, f"broadcast_{rng.choice(BROADCAST)}")(x, y, name=name)
        if kind == 6:
            return self._scalar(self._pick()[0])
        if kind == 7:
            x, shape = self._pick()
            others = [self._like(shape) for _ in range(rng.randrange(1, 4))]
            join = rng.randrange(3)
            if join == 0:
                return sym.add_n(x, *others, name=name)
            if join == 1:
                return sym.Concat(x, *others, dim=rng.randrange(len(shape)), name=name)
            return sym.stack(x, *others, axis=0, name=name)
        if kind == 8:
            return self._split(name)
        if kind == 9:
            return self._moved(name)
        if kind == 10:
            return self._image(name)
        if kind == 11:
            return self._layer(name)
        if kind == 12:
            return self._indexed(name)
        return self._matrix(name)

    def _scalar(self, x: Any) -> Any:
        value = self.rng.choice((0.5, 2.0, -1.5, 3.0))
        return self.rng.choice(
            (
                lambda: x + value,
                lambda: x - value,
                lambda: value - x,
                lambda: x * value,
                lambda: x / value,
                lambda: value / x,
                lambda: x**2.0,
                lambda: sym.maximum(x, value),
                lambda: sym.minimum(x, value),
                lambda: x % value,
                lambda: x > value,
                lambda: x == value,
                lambda: sym.clip(x, a_min=-value * value, a_max=value * value),
                lambda: sym.smooth_l1(x, scalar=1.0),
                lambda: sym.Cast(x, dtype=self.rng.choice(("float32", "float16", "float64"))),
            )
        )()

    def _split(self, name: str) -> Any:
        x, shape = self._pick()
        axis = self.rng.randrange(len(shape))
        kind = self.rng.randrange(4)
        if kind == 0:
            return sym.SliceChannel(x, num_outputs=shape[axis], axis=axis, squeeze_axis=len(shape) > 2, name=name)
        if kind == 1:
            return sym.SliceChannel(x, num_outputs=2, axis=axis, name=name)
        if kind == 2:
            return sym.topk(x, k=2, ret_typ=self.rng.choice(("both", "value", "indices")), axis=axis, name=name)
        return sym.moments(x, axes=(axis,), name=name)

    def _moved(self, name: str) -> Any:
        x, shape = self._pick()
        rng, axis = self.rng, self.rng.randrange(len(shape))
        return rng.choice(
            (
                lambda: sym.Reshape(x, shape=(-1, shape[-1]), name=name),
                lambda: sym.Reshape(x, shape=(0, -1), name=name),
                lambda: sym.expand_dims(x, axis=axis, name=name),
                lambda: sym.SwapAxis(x, dim1=0, dim2=axis, name=name),
                lambda: sym.slice_axis(x, axis=axis, begin=0, end=max(1, shape[axis] // 2), name=name),
                lambda: sym.slice(x, begin=(1,), end=(shape[0],), name=name),
                lambda: sym.tile(x, reps=(2,), name=name),
                lambda: sym.repeat(x, repeats=2, axis=axis, name=name),
                lambda: sym.reverse(x, axis=axis, name=name),
                lambda: sym.sum(x, axis=axis, keepdims=rng.random() < 0.5, name=name),
                lambda: sym.mean(x, axis=axis, keepdims=True, name=name),
                lambda: sym.max(x, axis=axis, name=name),
                lambda: sym.broadcast_axis(sym.sum(x, axis=axis, keepdims=True), axis=axis, size=3, name=name),
                lambda: sym.squeeze(sym.expand_dims(x, axis=0), axis=0, name=name),
                lambda: sym.norm(x, ord=rng.choice((1, 2)), axis=axis, keepdims=True, name=name),
            )
        )()

    def _image(self, name: str) -> Any:
        x, rng = self._pick(4)[0], self.rng
        return rng.choice(
            (
                lambda: sym.Convolution(
                    x, num_filter=4, kernel=(3, 3), pad=(1, 1), no_bias=rng.random() < 0.5, name=name
                ),
                lambda: sym.Convolution(x, num_filter=4, kernel=(1, 1), num_group=2, name=name),
                lambda: sym.Deconvolution(x, num_filter=2, kernel=(2, 2), stride=(2, 2), name=name),
                lambda: sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type=rng.choice(("max", "avg")), name=name),
                lambda: sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", name=name),
                lambda: sym.BatchNorm(x, fix_gamma=rng.random() < 0.5, output_mean_var=rng.random() < 0.3, name=name),
                lambda: sym.InstanceNorm(x, name=name),
                lambda: sym.GroupNorm(x, num_groups=2, name=name),
                lambda: sym.LRN(x, nsize=3, name=name),
                lambda: sym.UpSampling(x, scale=2, sample_type="nearest", name=name),
                lambda: sym.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1), name=name),
                lambda: sym.depth_to_space(x, block_size=2, name=name),
                lambda: sym.space_to_depth(x, block_size=2, name=name),
                lambda: sym.Crop(x, h_w=(2, 2), name=name),
            )
        )()

    def _layer(self, name: str) -> Any:
        rng = self.rng
        x = self._pick(3 if rng.random() < 0.3 else None)[0]
        return rng.choice(
            (
                lambda: sym.FullyConnected(x, num_hidden=rng.choice((2, 6)), no_bias=rng.random() < 0.5, name=name),
                lambda: sym.FullyConnected(x, num_hidden=6, flatten=False, name=name),
                lambda: self._unrolled(x, name),
                lambda: sym.Activation(x, act_type=rng.choice(ACTIVATIONS), name=name),
                lambda: sym.LeakyReLU(x, act_type=rng.choice(LEAKY), name=name),
                lambda: sym.Dropout(x, p=0.3, name=name),
                lambda: sym.LayerNorm(x, name=name),
                lambda: sym.BatchNorm(x, name=name),
                lambda: sym.SoftmaxOutput(x, name=name),
                lambda: sym.SoftmaxActivation(x, name=name),
                lambda: sym.SVMOutput(x, name=name),
                lambda: sym.RNN(
                    x,
                    state_size=3,
                    num_layers=rng.randrange(1, 3),
                    mode=rng.choice(("lstm", "gru", "rnn_tanh")),
                    state_outputs=rng.random() < 0.5,
                    p=0.2,
                    name=name,
                ),
                lambda: sym.SequenceReverse(x, name=name),
                lambda: sym.SequenceLast(x, name=name),
                lambda: sym.SequenceMask(x, name=name),
            )
        )()

    def _unrolled(self, x: Any, name: str) -> Any:
        """Return layers with one shared weight, in sequence or parallel.

        Sometimes another node reads the weight or an intermediate result.
        """
        rng, hidden = self.rng, self.rng.choice((3, 8))
        weight, bias, inner = (sym.Variable(f"{name}_{kind}") for kind in ("weight", "bias", "inner"))
        no_bias = rng.random() < 0.3
        own = {"num_hidden": hidden, "weight": weight} | ({"no_bias": True} if no_bias else {"bias": bias})
        recurrent = rng.random() < 0.6
        state, seen = None, []
        for step in range(rng.randrange(2, 6)):
            node = sym.FullyConnected(x * (step + 1.0), name=f"{name}_{step}", **own)
            if recurrent and state is not None:
                node = node + sym.FullyConnected(
                    state, num_hidden=hidden, no_bias=True, weight=inner, name=f"{name}_{step}_inner"
                )
            state = sym.Activation(node, act_type=rng.choice(ACTIVATIONS), name=f"{name}_{step}_state")
            seen.append(rng.choice((state, state, state, node)))
        if rng.random() < 0.2:
            seen.append(sym.broadcast_add(sym.sum(weight), state))
        return sym.add_n(*seen, name=name)

    def _indexed(self, name: str) -> Any:
        (x, shape), rng = self._pick(), self.rng
        whole = sym.clip(sym.round(self._pick()[0]), a_min=0, a_max=1)
        return rng.choice(
            (
                lambda: sym.take(x, whole, name=name),
                lambda: sym.Embedding(whole, input_dim=2, output_dim=3, name=name),
                lambda: sym.one_hot(sym.BlockGrad(whole), depth=3, name=name),
                lambda: sym.pick(x, sym.clip(sym.round(sym.sum(x, axis=-1)), a_min=0, a_max=1), name=name),
                lambda: sym.where(x > 0, x, self._like(shape), name=name),
                lambda: sym.batch_take(x, sym.clip(sym.round(sym.max(x, axis=1)), a_min=0, a_max=1), name=name),
                lambda: sym.argmax_channel(x, name=name),
                lambda: sym._random_uniform(shape=shape, name=name) * x,
            )
        )()

    def _matrix(self, name: str) -> Any:
        (x, shape), rng = self._pick(rng_rank := self.rng.choice((2, 3))), self.rng
        operand = self._like(shape)
        if rng_rank == 2:
            return rng.choice(
                (
                    lambda: sym.dot(x, operand, transpose_b=True, name=name),
                    lambda: sym.dot(x, operand, transpose_a=True, name=name),
                    lambda: sym.linalg_syrk(x, alpha=0.5, name=name),
                    lambda: sym.linalg_gemm2(x, operand, transpose_b=True, name=name),
                )
            )()
        return rng.choice(
            (
                lambda: sym.batch_dot(x, operand, transpose_b=True, name=name),
                lambda: sym.linalg_gemm2(x, operand, transpose_a=True, name=name),
            )
        )()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def option_sets() -> dict[str, dict[str, Any]]:
    """Return fields of :class:`PlanOptions` by the name of the set: every strategy with every rule and graph option."""
    sets: dict[str, dict[str, Any]] = {}
    for strategy in ("auto", "arena", "match_range", "none"):
        for compat in ("none", "mxnet", "paddle", "paddle_pir"):
            sets[f"{strategy}, {compat}"] = {"strategy": strategy, "compat": compat}
    for name in ("mxnet", "echo", "sqrt", "cheap"):
        sets[f"recompute {name}"] = {"recompute": name}
    return sets | {
        "colours": {"num_temp": 3},
        "coloured blocks": {"strategy": "match_range", "num_temp": 3},
        "mxnet, its sizes": {"strategy": "match_range", "compat": "mxnet", "sizes": "mxnet"},
        "sums in place": {"inplace_grad_sum_cap": 2, "compat": "mxnet"},
        "another order": {"reorder": True},
        "no merging": {"eliminate_common_expr": False},
        "exact blocks, sweep": {"strategy": "match_range", "match_range": 16, "auto_search": True},
        "nothing in place": {"enable_inplace": False},
        "longest search": {"strategy": "arena", "effort": "max", "alignment": 8},
    }


def without_sharing(fields: dict[str, Any]) -> PlanOptions:
    """Return options that plan the same graph with separate memory for every entry."""
    kept = {k: v for k, v in fields.items() if k in ("inplace_grad_sum_cap", "eliminate_common_expr")}
    if fields.get("compat") == "mxnet":
        kept["compat"] = "mxnet"
    return PlanOptions(strategy="none", enable_inplace=False, **kept)
