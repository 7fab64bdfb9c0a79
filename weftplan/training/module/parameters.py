"""Initial values of parameters and auxiliary states: caller-provided or from the initializer.

Missing or unknown names raise before any array is written. The functions are stateless and run on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from weftplan import ndarray as nd
from weftplan.device.context import Context
from weftplan.errors import BindError, MXNetError, ParameterError, ShapeError, listed
from weftplan.executor.run_values import check_shapes
from weftplan.kvstore import KVStoreBase, KVStoreLocal
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol
from weftplan.training.executor_group import ExecutorGroup, as_ndarray
from weftplan.training.initializers.initializer import InitDesc, Initializer, Rule

_HOST = Context("cpu", 0)


class AssignableModule(Protocol):
    """A Module whose parameters can be assigned."""

    symbol: Symbol
    param_names: list[str]
    aux_names: list[str]
    label_names: list[str]
    for_training: bool
    params_initialized: bool
    _arg_params: dict[str, NDArray] | None
    _aux_params: dict[str, NDArray] | None
    _kvstore: KVStoreBase | None
    _update_on_kvstore: bool

    @property
    def group(self) -> ExecutorGroup:
        """The bound executors."""
        ...


def unknown_names(
    module: AssignableModule, args: Mapping[str, NDArray] | None, aux: Mapping[str, NDArray] | None
) -> list[str]:
    """Return the names of given values that a module's network lacks (possibly misspelt)."""
    inputs, states = module.symbol.list_arguments(), module.aux_names
    return [name for name in args or () if name not in inputs] + [name for name in aux or () if name not in states]


def refuse_unknown(verb: str, unknown: Sequence[str], count: int, lacking: Sequence[str]) -> None:
    """Raise ParameterError if there are unknown names.

    Args:
        verb: the method that was called.
        unknown: names of given values that the network lacks.
        count: number of given values.
        lacking: parameters that need a value and were given none.
    """
    if unknown:
        advice = "pass allow_extra=True to ignore them"
        if lacking:
            advice = f"and nothing for {listed(lacking)}; where the head is another, pass allow_missing=True"
        raise ParameterError(
            f"{verb}: unknown names {listed(unknown)}, {count - len(unknown)} of {count} match; {advice}"
        )


def complete(
    args: Mapping[str, NDArray],
    params: Sequence[str],
    aux: Mapping[str, NDArray],
    states: Sequence[str],
    *,
    training: bool,
) -> None:
    """Raise MXNetError if a loaded checkpoint lacks a parameter or an auxiliary state, which would stay zero.

    Without ``training``, a label that is classified as a parameter may be missing.
    """
    lost = [name for name in params if name not in args and (training or not name.endswith("label"))]
    lost += [name for name in states if name not in aux]
    if lost:
        raise MXNetError(
            f"bind: the checkpoint has no value for {listed(lost)}; if that is a label, name it in label_names; else "
            f"load it with mx.model.load_checkpoint, and give its parameters to init_params(arg_params=…, "
            f"aux_params=…, allow_missing=True)"
        )


def assign(
    module: AssignableModule,
    verb: str,
    arg_params: Mapping[str, NDArray] | None,
    aux_params: Mapping[str, NDArray] | None,
    rule: Rule | None,
    *,
    allow_missing: bool,
    allow_extra: bool,
) -> None:
    """Copy caller-provided values, and initial values by ``rule``, to every context and the store.

    Args:
        module: the bound module.
        verb: the method that was called, for errors.
        arg_params, aux_params: values by name; None: none.
        rule: initializer of the other values; None leaves them as they are.
        allow_missing, allow_extra: as for ``init_params``.

    Raises:
        ParameterError: an unknown name, unless it is allowed.
        MXNetError, ShapeError, BindError: see :func:`first_values`.
    """
    group, names, state_names = module.group, module.param_names, module.aux_names
    is_complete = arg_params is not None and not allow_missing
    if not allow_extra:
        lacking = [name for name in names if name not in (arg_params or {})]
        # If all parameters and states are given, the unknown values belong to a larger network: accept them.
        if not (is_complete and not lacking and {*state_names} <= {*(aux_params or {})}):
            count = len(arg_params or {}) + len(aux_params or {})
            refuse_unknown(verb, unknown_names(module, arg_params, aux_params), count, [] if allow_missing else lacking)
    values = partial(
        first_values,
        rule=rule,
        attrs=module.symbol.attr_dict(),
        label_names=module.label_names,
        training=module.for_training,
    )
    params = {name: arrays[0] for name, arrays in zip(names, group.param_arrays, strict=True)}
    states = {name: arrays[0] for name, arrays in zip(state_names, group.aux_arrays, strict=True)}
    args = values(params, arg_params, complete=is_complete)
    aux = values(states, aux_params, complete=is_complete and aux_params is not None)
    module._arg_params = {**(module._arg_params or {}), **args}
    module._aux_params = {**(module._aux_params or {}), **aux}
    # All values exist: from here on arrays are only written.
    group.set_params(args, aux)
    if module._update_on_kvstore and isinstance(module._kvstore, KVStoreLocal):
        # The store has its own weights, and the next update would restore them.
        for name, arrays in zip(names, group.param_arrays, strict=True):
            module._kvstore.replace(name, arrays[0])
    module.params_initialized = True


def first_values(
    likes: Mapping[str, NDArray],
    initial: Mapping[str, NDArray] | None,
    *,
    rule: Callable[[InitDesc, NDArray], None] | None,
    complete: bool,
    attrs: Mapping[str, Mapping[str, str]],
    label_names: Sequence[str],
    training: bool,
) -> dict[str, NDArray]:
    """Compute initial values for the names of ``likes``. The initializer is called in alphabetical order, as in MXNet.

    Args:
        likes: bound arrays, which define shapes and dtypes.
        initial: values by name.
        rule: initializer of the other values, on the host; None leaves them out.
        complete: whether all values must be given.
        attrs: attributes of the network's variables, ``__init__`` among them.
        label_names: the inputs that are labels, for the message about a label taken for a parameter.
        training: whether the network is bound for training. For prediction, a name that ends in ``label`` is left out
            if it has no value.

    Raises:
        MXNetError: ``complete``, and a value is missing.
        ShapeError: a given value has another shape.
        BindError: for training, ``rule`` would initialize a label.
    """
    matched = {} if initial is None else {name: initial[name] for name in likes if name in initial}
    check_shapes(((name, likes[name].shape, getattr(value, "shape", None)) for name, value in matched.items()), "")
    values = {}
    for name, like in likes.items():
        as_label = name.endswith("label") and "__init__" not in attrs.get(name, {})
        if initial is not None and name in initial:
            value = as_ndarray(initial[name], f"parameter {name!r}")
            if tuple(value.shape) != tuple(like.shape):
                raise ShapeError(f"parameter {name!r}: the network needs {like.shape}, got {value.shape}")
        elif as_label and not training:
            continue
        elif complete:
            missing = [
                other_name
                for other_name in likes
                if other_name not in matched and (training or not other_name.endswith("label"))
            ]
            which = f"parameter {name!r} is" if len(missing) == 1 else f"parameters {listed(missing)} are"
            raise MXNetError(
                f"{which} missing from the given ones, of which {len(matched)} of {len(initial or ())} match; pass "
                f"allow_missing=True to init what is missing"
            )
        elif rule is None:
            continue
        elif as_label:
            raise BindError(
                f"{name!r} would be a parameter, since label_names are {list(label_names)}; pass "
                f"label_names=[{name!r}] to Module, and label_name={name!r} to the data iterator"
            )
        else:
            value = nd.empty(like.shape, ctx=_HOST, dtype=like.dtype)
        values[name] = value
    for name in sorted(values.keys() - (initial or {}).keys()):
        assert rule is not None
        rule(InitDesc(name, attrs.get(name), rule if isinstance(rule, Initializer) else None), values[name])
    return values
