"""``mx.mod.Module``: a symbol with its parameters, trained on one or several contexts.

The file is long because it holds a single class with many short methods, MXNet's. Their implementation is in the other
files of this folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.device.context import Context
from weftplan.errors import BindError, FormatError, MXNetError, ShapeError, listed
from weftplan.kvstore import KVStoreBase, Updater
from weftplan.kvstore.keys import Key
from weftplan.kvstore.mxnet_states import write_mxnet_states
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import replacing
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.package_log import log
from weftplan.support.progress import watching
from weftplan.support.rollback import all_or_nothing, rollback
from weftplan.symbol import Symbol
from weftplan.training.executor_group import ExecutorGroup, GradReq
from weftplan.training.fit.fit_module import Descs, Logs, OptimizerLike, OptimizerSettings, StoreLike
from weftplan.training.fit.monitor import Monitor
from weftplan.training.fit.parameter_files import load_checkpoint, params_path
from weftplan.training.fit.precision import lowered
from weftplan.training.initializers import initializer as initializers
from weftplan.training.initializers.initializer import Initializer, Uniform
from weftplan.training.kvstore_setup import choose_optimizer, choose_store, compress, first_values
from weftplan.training.memory import check_share, module_share
from weftplan.training.module.base_module import as_descs
from weftplan.training.module.bound_module import BoundModule
from weftplan.training.module.module_checks import (
    check_batch,
    context_list,
    group_placement,
    input_names,
    load_list,
    named_as,
    resized,
)
from weftplan.training.module.module_steps import InitOptions, Params
from weftplan.training.module.optimizer_states import adopt, all_states, read_states, states_holder
from weftplan.training.module.parameters import assign, complete, unknown_names
from weftplan.training.module.update_step import UpdateStep
from weftplan.training.optimizers import sgd_adam as optimizers


# Guarantees of a module:
# * A method that raises has changed nothing of the module, its monitors, and a store or optimizer that it was given
#   (``all_or_nothing``); ``forward``, ``backward`` and ``update`` only push operations.
# * All executors have the same parameters, and a store that applies the optimizer has them, too, unless ``apart``.
# * Rebinding and another batch size keep the values of parameters and states of the optimizer.
# One thread at a time uses a module. Fixed after the constructor: symbol, names, contexts, work loads, placement.
# Changing: with ``bind`` and ``reshape`` ``_group``, ``_bind_options``, ``memory_budget``; with ``init_optimizer`` the
# store, the updater and ``_update_step``; with the parameters ``_arg_params``, ``_aux_params``, the values that a later
# bind starts from.
class Module(BoundModule):
    """Trainable network: ``symbol`` with parameters, executors and an optimizer.

    Args:
        symbol: the network.
        data_names, label_names: arguments that are inputs; all others are parameters.
        logger: logger of ``fit``; default: the logger ``weftplan``.
        context: a context or a list; the batch is split over a list. Default: the current context.
        work_load_list: for each context a number in proportion to which it gets samples of a batch; default: equal
            parts.
        fixed_param_names: parameters that are not trained.
        state_names: arguments that are neither fed nor trained, such as the initial states of recurrent cells. They are
            zero until :meth:`set_states`.
        group2ctxs: mapping from ``ctx_group`` to context, or a list with a mapping per context.
        compression_params: for ``set_gradient_compression`` of the kvstore.
        memory_budget: most bytes that training may take, such as ``"2GB"`` or ``"80%"`` of the device's memory:
            executors, Module's host copies, kvstore buffers and optimizer states. All CPU contexts share the budget;
            it applies to every other device separately. If needed to fit, forward results are recomputed or offloaded
            to the host.
    """

    def __init__(
        self,
        symbol: Symbol,
        data_names: Sequence[str] | None = ("data",),
        label_names: Sequence[str] | None = ("softmax_label",),
        logger: Logs | None = None,
        context: Context | Sequence[Context] | None = None,
        work_load_list: Sequence[float] | None = None,
        fixed_param_names: Sequence[str] | None = None,
        state_names: Sequence[str] | None = None,
        group2ctxs: Mapping[str, Context] | Sequence[Mapping[str, Context]] | None = None,
        compression_params: Mapping[str, object] | None = None,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__(logger)
        if not isinstance(symbol, Symbol):
            raise BindError(
                f"Module needs a Symbol (mx.sym.load opens a file), got {type(symbol).__name__}: {symbol!r}"
            )
        self.symbol: Symbol = symbol
        self.contexts = context_list(context)
        self._work_load_list = load_list(work_load_list, len(self.contexts))
        self._group2ctxs = group_placement(group2ctxs, len(self.contexts))
        self._compression_params = compression_params
        names = input_names(symbol, data_names, label_names, fixed_param_names, state_names)
        self.data_names, self.label_names, self.state_names = names.data, names.labels, names.states
        self.param_names, self.fixed_param_names = names.params, names.fixed
        self.aux_names = symbol.list_auxiliary_states()
        self.output_names = symbol.list_outputs()
        self.memory_budget = memory_budget
        self._announced: tuple[StoreLike, optimizers.Optimizer | None] = ("local", None)
        """Kvstore and optimizer that ``fit`` will use, for the memory budget of a bind before ``init_optimizer``."""
        self._param_index = {name: index for index, name in enumerate(self.param_names)}
        """Index of each parameter, from which optimizer keys follow; of the lender's after ``borrow_optimizer``."""
        self._arg_params: dict[str, NDArray] | None = None
        self._aux_params: dict[str, NDArray] | None = None
        self._group: ExecutorGroup | None = None
        self._bind_options: dict[str, Any] = {}
        self._kvstore: KVStoreBase | None = None
        self._update_on_kvstore = False
        self._update_step: UpdateStep | None = None
        self._updater: Updater | None = None
        self._optimizer: optimizers.Optimizer | None = None
        self._pending_states: bytes | None = None
        self._micro_batches = 1
        self._precision: str | None = None
        self.loss_scale = None
        self._ran = False
        self._monitors: list[Monitor] = []

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.contexts))
        if self._group is None:
            return f"<{type(self).__name__} {', '.join(self.output_names)} on {devices}: not bound>"
        store = None if self._kvstore is None else self._kvstore.type
        inputs = ", ".join(f"{desc.name} {desc.shape}" for desc in (*self.data_shapes, *self.label_shapes))
        update = f"; {self._optimizer!r}, kvstore {store}" if self.optimizer_initialized else ""
        values = "" if self.params_initialized else "; parameters without values"
        return f"<{type(self).__name__} {', '.join(self.output_names)} on {devices}: bound to {inputs}{values}{update}>"

    # -- binding --------------------------------------------------------------------------------------------------

    @known_keywords()
    @all_or_nothing
    def bind(
        self,
        data_shapes: Descs,
        label_shapes: Descs | None = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        force_rebind: bool = False,
        shared_module: Module | None = None,
        grad_req: GradReq = "write",
        memory_budget: int | str | None = None,
    ) -> None:
        """Plan and allocate one executor per context.

        Args:
            data_shapes, label_shapes: ``[(name, shape)]`` of a whole batch (or DataDescs), in the order of a batch's
                arrays.
            for_training: bind gradients too.
            inputs_need_grad: also the gradients of the data.
            force_rebind: rebind if already bound; parameters keep their values.
            shared_module: a bound module whose memory, parameters and optimizer are shared.
            grad_req: ``write`` or ``add`` for all trained arguments; or a list or a dictionary with the grad_req of
                each argument.
            memory_budget: overrides the constructor's budget. It includes the optimizer states only if ``fit`` binds,
                because ``fit`` knows the optimizer; ``init_optimizer`` refuses an optimizer whose states do not fit.

        Raises:
            BudgetError: nothing fits the memory budget; nothing has been allocated.
            MXNetError: the loaded checkpoint lacks a parameter or an auxiliary state.
        """
        if self.binded and not force_rebind:
            return
        if self.binded and self.params_initialized:
            self._arg_params, self._aux_params = self.group.get_params(apart=self.apart)
        data = named_as(as_descs(data_shapes), self.data_names, "data")
        label = named_as(as_descs(label_shapes), self.label_names, "label") if label_shapes else []
        if self._arg_params is not None and self._aux_params is not None:
            complete(self._arg_params, self.param_names, self._aux_params, self.aux_names, training=for_training)
        if memory_budget is not None:
            self.memory_budget = memory_budget
        self._bind_options = {"for_training": for_training, "inputs_need_grad": inputs_need_grad, "grad_req": grad_req}
        self.for_training, self.inputs_need_grad = for_training, inputs_need_grad
        self._replace_group(data, label, None if shared_module is None else shared_module.group)
        self.binded = True
        if shared_module is not None and shared_module.params_initialized:
            self._arg_params, self._aux_params = shared_module.get_params()
            self.params_initialized = True
            if shared_module.optimizer_initialized:
                lost = self._lacking(shared_module)
                if lost:
                    self.logger.warning("bind: the optimizer is not shared, because %s are no parameters there", lost)
                else:
                    self.borrow_optimizer(shared_module)
        elif self._arg_params is not None and self._aux_params is not None:
            self.group.set_params(self._arg_params, self._aux_params)
            self.params_initialized = True

    def _replace_group(self, data: list[DataDesc], label: list[DataDesc], shared: ExecutorGroup | None) -> None:
        """Bind executors for these shapes, and let the monitors watch them instead of the previous executors."""
        kvstore, optimizer = (self._kvstore, self._optimizer) if self.optimizer_initialized else self._announced
        with watching("planning within the memory budget", long=self.memory_budget is not None):
            group = ExecutorGroup(
                self.symbol if self._precision is None else lowered(self.symbol, self._precision),
                self.contexts,
                data,
                label,
                self.param_names,
                fixed_param_names=self.fixed_param_names,
                shared_group=shared,
                group2ctxs=self._group2ctxs,
                share=module_share(self, data, label, kvstore, optimizer),
                state_names=self.state_names,
                loads=self._work_load_list,
                **self._bind_options,
            )
        for old, new in zip([] if self._group is None else self._group.executors, group.executors, strict=False):
            if old.monitor_callback is not None:
                new.set_monitor_callback(*old.monitor_callback)
        for monitor in self._monitors:
            for executor in [] if self._group is None else self._group.executors:
                monitor.uninstall(executor)
            for executor in group.executors:
                monitor.install(executor)
        self._group = group
        self._ran = False
        if self.loss_scale is not None:
            self.set_loss_scale(self.loss_scale)

    def rollback_parts(self) -> list[object]:
        return [self, *self._monitors, *([] if self._group is None else self._group.executors)]

    def _expect(
        self,
        memory_budget: int | str | None,
        kvstore: StoreLike,
        optimizer: OptimizerLike,
        settings: OptimizerSettings,
        *,
        rebind: bool,
    ) -> None:
        if memory_budget is not None:
            if self.binded and not rebind:
                raise BindError("fit: the module is bound already; pass force_rebind=True to let memory_budget act")
            self.memory_budget = memory_budget
        if self.memory_budget is not None and not self.optimizer_initialized:
            chosen = choose_optimizer(optimizer, settings, symbol=self.symbol, names={}, batch_size=1)
            self._announced = (kvstore, chosen)

    @all_or_nothing
    def install_monitor(self, mon: Monitor) -> None:
        """Let ``mon`` watch every executor, also after a rebind; it replaces any previous monitor.

        Executors that have run are bound again without fusion, if fusion would hide outputs.
        """
        self._need("install_monitor", binded=True)
        if any(executor.hidden_outputs and executor.has_run for executor in self.group.executors):
            self._replace_group(self.group.data_shapes, self.group.label_shapes, self.group)
        with rollback(mon):
            self._monitors = [mon]
            for executor in self.group.executors:
                mon.install(executor)

    @all_or_nothing
    def reshape(self, data_shapes: Descs, label_shapes: Descs | None = None) -> None:
        """Bind for other input shapes; parameters, their gradients and the planned memory are shared."""
        self._need("reshape", binded=True)
        data = named_as(as_descs(data_shapes), self.data_names, "data")
        label = named_as(as_descs(label_shapes), self.label_names, "label") if label_shapes else []
        self._replace_group(data, label, self.group)

    # -- parameters -----------------------------------------------------------------------------------------------

    def _init_params(
        self,
        initializer: Initializer | None,
        arg_params: Params | None,
        aux_params: Params | None,
        options: InitOptions,
    ) -> None:
        self._need("init_params", binded=True)
        allow_missing, _, allow_extra = options
        rule = initializers.create(initializer) if initializer is not None else Uniform(0.01)
        if allow_missing and not allow_extra:
            extra = unknown_names(self, arg_params, aux_params)
            allow_extra = len(extra) < len(arg_params or {}) + len(aux_params or {})
            if extra and allow_extra:
                self.logger.warning("the network has no parameters named %s: they are not used", listed(extra))
        assign(self, "init_params", arg_params, aux_params, rule, allow_missing=allow_missing, allow_extra=allow_extra)

    def _set_params(self, arg_params: Params, aux_params: Params | None, options: InitOptions) -> None:
        self._need("set_params", binded=True)
        allow_missing, _, allow_extra = options
        rule = None if self.params_initialized else Uniform(0.01)
        assign(self, "set_params", arg_params, aux_params, rule, allow_missing=allow_missing, allow_extra=allow_extra)

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return (arg_params, aux_params) as host copies; values that differ between contexts are averaged."""
        self._need("get_params", binded=True, params=True)
        return self.group.get_params(apart=self.apart)

    @property
    def apart(self) -> bool:
        """Whether the contexts train separate parameters, because no store exchanges their gradients."""
        return len(self.contexts) > 1 and self.optimizer_initialized and self._kvstore is None

    def synchronize(self) -> None:
        self._need("synchronize", binded=True, params=True)
        if len(self.contexts) > 1 and (self.aux_names or self.apart):
            args, aux = self.get_params()
            self.group.set_params(args if self.apart else {}, aux)

    # -- optimizer ------------------------------------------------------------------------------------------------

    def _init_optimizer(
        self, kvstore: StoreLike, optimizer: OptimizerLike, settings: OptimizerSettings, *, force_init: bool
    ) -> None:
        self._need("init_optimizer", binded=True, params=True)
        if self.optimizer_initialized and not force_init:
            self.logger.warning(
                "the module has an optimizer already, which stays; call init_optimizer(…, force_init=True) before fit "
                "to replace it"
            )
            return
        largest = max((a[0].size for a in self.group.param_arrays), default=0)
        store, on_store = choose_store(kvstore, contexts=len(self.contexts), largest=largest)
        # A caller's store or optimizer is changed below: names, keys, settings.
        with rollback(*(target for target in (store, optimizer) if hasattr(target, "__dict__"))):
            if store is not None and self._compression_params:
                compress(store, self._compression_params)
            workers = store.num_workers if store is not None and "dist" in store.type else 1
            chosen = choose_optimizer(
                optimizer,
                settings,
                symbol=self.symbol,
                names=self._index_names(on_store),
                batch_size=self.group.batch_size * workers * self._micro_batches,
            )
            group = self.group
            check_share(self, [*group.data_shapes, *group.label_shapes], group.executors, store, chosen)
            self._announced = (store, chosen)
            self._optimizer, self._kvstore, self._update_on_kvstore = chosen, store, on_store
            self._update_step = None
            self._updater = None if on_store else Updater(chosen)
            if store is not None:
                if on_store:
                    store.set_optimizer(chosen)
                trained = [grads is not None for grads in self.group.grad_arrays]
                first_values(store, self.param_names, self.group.param_arrays, trained, on_store=on_store)
            self.optimizer_initialized = True
            if self._pending_states is not None:
                self._set_states(self._pending_states)
                self._pending_states = None

    @all_or_nothing
    def borrow_optimizer(self, shared_module: Module) -> None:
        """Use the optimizer, the states and the kvstore of another module with shared parameters.

        Raises:
            MXNetError: the other module has no optimizer, or lacks a parameter of this module.
        """
        self._need("borrow_optimizer", binded=True)
        shared_module._need("borrow_optimizer", optimizer=True)
        lost = self._lacking(shared_module)
        if lost:
            raise MXNetError(f"borrow_optimizer: {lost} are trained here, and no parameters of the other module")
        self._param_index, self._update_step = shared_module._param_index, None
        self._optimizer, self._kvstore = shared_module._optimizer, shared_module._kvstore
        self._updater, self._update_on_kvstore = shared_module._updater, shared_module._update_on_kvstore
        self.optimizer_initialized = True

    def _lacking(self, lender: Module) -> list[str]:
        """Return the trained parameters of this module that another module does not have."""
        trained = [name for name, grads in zip(self.param_names, self.group.grad_arrays, strict=True) if grads]
        return [name for name in trained if name not in lender._param_index]

    def _index_names(self, on_store: bool) -> dict[Key, str]:
        """Return optimizer key -> parameter; without a store, each context has its own key of each parameter."""
        if on_store:
            return {name: name for name in self.param_names}
        count = len(self.contexts)
        return {i * count + k: name for name, i in self._param_index.items() for k in range(count)}

    def update(self) -> None:
        """Exchange all gradients through the store, the last layers' first, and update the parameters."""
        self._need("update", binded=True, params=True, optimizer=True)
        step = self._update_step
        if step is None or step.group is not self._group or step.store is not self._kvstore:
            step = UpdateStep(self.group, self._kvstore, self._param_index, on_store=self._update_on_kvstore)
            self._update_step = step
        step.run(self._updater)

    def owner(self) -> Module:
        return self

    def _accumulate(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    # -- running --------------------------------------------------------------------------------------------------

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Copy the batch in and run forward, asynchronously; a batch of another size rebinds by :meth:`reshape`.

        Args:
            is_train: training mode; default: as bound.
        """
        self._need("forward", binded=True, params=True)
        training = self.for_training if is_train is None else bool(is_train)
        shapes = check_batch(data_batch, self.group, self.label_names if training else ())
        if shapes == [tuple(d.shape) for d in self.group.data_shapes]:
            self._load_and_run(data_batch, is_train=training)
            return
        with rollback(*self.rollback_parts()):
            try:
                self.reshape(*resized(self.group, shapes, getattr(data_batch, "label", None)))
            except ShapeError as error:
                bound = [(d.name, d.shape) for d in self.group.data_shapes]
                raise ShapeError(
                    f"forward: the batch's data have shapes {shapes}, bound were {bound}; binding for them fails: "
                    f"{error}"
                ) from None
            self._load_and_run(data_batch, is_train=training)

    def _load_and_run(self, data_batch: DataBatch, *, is_train: bool) -> None:
        self.group.load(data_batch)
        self.group.forward(is_train=is_train)
        self._ran = True

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        """Run backward on every context, asynchronously."""
        self._need("backward", binded=True, params=True)
        if not self.for_training:
            raise MXNetError("backward: the module was bound with for_training=False")
        self.group.backward(out_grads)

    # -- files ----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        prefix: str | os.PathLike[str],
        epoch: int,
        save_optimizer_states: bool = False,
        remove_amp_cast: bool = True,
    ) -> Path:
        """Write symbol, parameters and, if asked, the optimizer's states; returns the parameter file's path.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file.
            save_optimizer_states: whether the optimizer's states are written too.
            remove_amp_cast: see :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.
        """
        path = params_path(prefix, epoch)
        self.symbol.save(f"{os.fsdecode(prefix)}-symbol.json", remove_amp_cast)
        self.save_params(path)
        log.info('Saved checkpoint to "%s"', path)
        if save_optimizer_states:
            states = params_path(prefix, epoch).with_suffix(".states")
            self.save_optimizer_states(states)
            log.info('Saved optimizer state to "%s"', states)
        return path

    @staticmethod
    def load(prefix: str | os.PathLike[str], epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """Return a module from a checkpoint; ``kwargs`` go to the constructor. Parameters are assigned at bind.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file.
            load_optimizer_states: whether the optimizer's states are read too.
            **kwargs: arguments of the constructor.
        """
        symbol, args, aux = load_checkpoint(prefix, epoch)
        module = Module(symbol, **kwargs)
        module._arg_params, module._aux_params = args, aux
        if load_optimizer_states:
            module._pending_states = read_states(params_path(prefix, epoch).with_suffix(".states"))
        return module

    def _states_holder(self) -> Updater:
        self._need("optimizer states", optimizer=True)
        return states_holder(self._updater, self._kvstore)

    def save_optimizer_states(self, fname: str | os.PathLike[str], *, mxnet: bool = False) -> None:
        """Write the optimizer's states to a file, whole or not at all.

        Args:
            fname: path of the file.
            mxnet: in the form of MXNet 1.9.1, whose ``load_optimizer_states`` can read it; without counts of updates.
        """
        self._need("save_optimizer_states", optimizer=True)
        holder = all_states(self._updater, self._kvstore)
        states = write_mxnet_states(holder.states) if mxnet else holder.get_states()
        with replacing(fname) as file:
            file.write(states)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load states of :meth:`save_optimizer_states`, written with any devices and with or without a kvstore.

        Raises:
            FormatError: damaged, or states of other parameters; nothing is changed.
        """
        self._need("load_optimizer_states", optimizer=True)
        data = read_states(fname)
        try:
            self._set_states(data)
        except FormatError as error:
            raise FormatError(f"{os.fspath(fname)}: {error}") from error

    def _set_states(self, data: bytes) -> None:
        rows = zip(self.param_names, self.group.param_arrays, self.group.grad_arrays, strict=True)
        arrays = {name: (weights, grads is not None) for name, weights, grads in rows}
        owner = all_states(self._updater, self._kvstore)
        adopt(owner, data, self._param_index, arrays, self._index_names(self._update_on_kvstore))
