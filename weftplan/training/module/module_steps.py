"""Steps with the same signature in every module: bind, init_params, set_params, init_optimizer.

A public method checks its keywords, gives the object its old fields back if it fails, and returns if there is nothing
to do. The work is in the private method of the same name, which a subclass defines. A class outside the package may
also override a public method, as in MXNet. One thread at a time uses a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed, known_keywords
from weftplan.support.rollback import all_or_nothing
from weftplan.training.executor_group import GradReq
from weftplan.training.fit.fit_module import Descs, OptimizerLike, OptimizerSettings, StoreLike
from weftplan.training.fit.overrides import overrides
from weftplan.training.initializers.initializer import Initializer

Params = Mapping[str, NDArray]


class BindOptions(NamedTuple):
    """Arguments of ``bind`` other than the shapes."""

    for_training: bool
    inputs_need_grad: bool
    force_rebind: bool
    shared_module: Any
    grad_req: GradReq


class InitOptions(NamedTuple):
    """Arguments of ``init_params`` and ``set_params`` other than the values."""

    allow_missing: bool
    force_init: bool
    allow_extra: bool


class ModuleSteps(Constructed):
    """Base of modules with the steps before the first batch."""

    binded: bool
    params_initialized: bool
    optimizer_initialized: bool
    _init_options: tuple[str, ...] = ("allow_missing", "force_init", "allow_extra")
    """Arguments of ``set_params`` that an overridden ``init_params`` gets, as in MXNet."""

    @known_keywords()
    @all_or_nothing
    def bind(
        self,
        data_shapes: Descs,
        label_shapes: Descs | None = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        force_rebind: bool = False,
        shared_module: Any = None,
        grad_req: GradReq = "write",
    ) -> None:
        """Plan and allocate executors for these shapes.

        A :class:`~weftplan.training.module.sequential_module.SequentialModule` binds each module for the outputs of the
        one before. A :class:`~weftplan.training.module.bucketing_module.BucketingModule` binds the default bucket;
        other buckets are bound when their first batch arrives. A
        :class:`~weftplan.training.module.python_module.PythonModule` stores the shapes, and computes those of the
        outputs.

        Args:
            data_shapes: (name, shape) or ``DataDesc`` of each input.
            label_shapes: the same of each label; None: no labels.
            for_training: whether gradients are planned and computed.
            inputs_need_grad: whether gradients of the inputs are computed.
            force_rebind: bind again, if the module is bound.
            shared_module: must be None; only :class:`~weftplan.training.module.module.Module` shares.
            grad_req: ``write``, ``add`` or ``null``, for all or by name.

        Raises:
            MXNetError: the module cannot be bound with these arguments; a subclass of it says why.
        """
        if not self.binded or force_rebind:
            options = BindOptions(for_training, inputs_need_grad, force_rebind, shared_module, grad_req)
            self._bind(data_shapes, label_shapes, options)

    def _bind(self, data_shapes: Descs, label_shapes: Descs | None, options: BindOptions) -> None:
        raise NotImplementedError

    @known_keywords()
    @all_or_nothing
    def init_params(
        self,
        initializer: Initializer | None = None,
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        allow_missing: bool = False,
        force_init: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Set every parameter to its given value, else to the initializer's (default ``Uniform(0.01)``).

        Args:
            initializer: gives values to all parameters that have none; None: ``Uniform(0.01)``.
            arg_params: values by name, which win over the initializer; None: none. A chain of modules shares them.
            aux_params: values of auxiliary states by name; None: none.
            allow_missing: whether parameters without a value are allowed.
            force_init: whether parameters that have a value are changed.
            allow_extra: whether names that the network does not have are ignored.

        Raises:
            MXNetError: a parameter is missing from ``arg_params``/``aux_params`` and ``allow_missing`` is False; or an
                unknown name is given and both ``allow_missing`` and ``allow_extra`` are False. With ``allow_missing``
                a mix of known and unknown names is only logged: a checkpoint may have another head than the network.
            ShapeError: a given value has another shape.
            ParameterError: two modules of a chain share a parameter name.
        """
        if not self.params_initialized or force_init:
            self._init_params(initializer, arg_params, aux_params, InitOptions(allow_missing, force_init, allow_extra))

    def _init_params(
        self,
        initializer: Initializer | None,
        arg_params: Params | None,
        aux_params: Params | None,
        options: InitOptions,
    ) -> None:
        raise NotImplementedError

    @known_keywords()
    @all_or_nothing
    def set_params(
        self,
        arg_params: Params,
        aux_params: Params | None,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Assign parameters. With ``allow_missing``, missing parameters keep their values, or are initialized if they
        have none yet. ``aux_params=None`` assigns no auxiliary state.

        Args:
            arg_params: values by name.
            aux_params: values of auxiliary states by name; None: none.
            allow_missing: whether parameters without a value are allowed.
            force_init: whether parameters that have a value are changed.
            allow_extra: whether names that the network does not have are ignored.

        Raises:
            MXNetError, ShapeError: as :meth:`init_params`.
        """
        options = InitOptions(allow_missing, force_init, allow_extra)
        passed_on: dict[str, Any] = {name: getattr(options, name) for name in self._init_options}
        calls_init = (
            not allow_missing and aux_params is not None and allow_extra in (False, passed_on.get("allow_extra"))
        )
        if calls_init and overrides(self, "init_params"):
            self.init_params(initializer=None, arg_params=arg_params, aux_params=aux_params, **passed_on)
        elif not self.params_initialized or force_init:
            self._set_params(arg_params, aux_params, options)

    def _set_params(self, arg_params: Params, aux_params: Params | None, options: InitOptions) -> None:
        raise NotImplementedError

    @known_keywords()
    @all_or_nothing
    def init_optimizer(
        self,
        kvstore: StoreLike = "local",
        optimizer: OptimizerLike = "sgd",
        optimizer_params: OptimizerSettings = (("learning_rate", 0.01),),
        force_init: bool = False,
    ) -> None:
        """Create the optimizer (``rescale_grad`` defaults to 1 / batch size) and the kvstore.

        Modules of a chain have an optimizer each and use the same store; buckets share those of the default bucket.

        Args:
            kvstore: a name, a store, or None. With one context and a local name there is no store.
            optimizer: a name or an :class:`~weftplan.training.optimizers.sgd_adam.Optimizer`.
            optimizer_params: its keyword arguments, a dictionary or pairs.
            force_init: replace an optimizer that exists.
        """
        self._init_optimizer(kvstore, optimizer, optimizer_params, force_init=force_init)

    def _init_optimizer(
        self, kvstore: StoreLike, optimizer: OptimizerLike, settings: OptimizerSettings, *, force_init: bool
    ) -> None:
        raise NotImplementedError
