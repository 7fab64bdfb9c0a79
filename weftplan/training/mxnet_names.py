"""Aliases for MXNet's private module and executor-group attributes, for scripts that read them.

Each alias forwards to a public attribute.
"""

from __future__ import annotations

from typing import Any

from weftplan.executor import Executor
from weftplan.ndarray import NDArray

_OF_MODULE = {
    "_symbol": "symbol",
    "_context": "contexts",
    "_data_names": "data_names",
    "_label_names": "label_names",
    "_param_names": "param_names",
    "_aux_names": "aux_names",
    "_output_names": "output_names",
    "_fixed_param_names": "fixed_param_names",
    "_state_names": "state_names",
    "_exec_group": "group",
}


def _other_name(public: str) -> property:
    return property(
        lambda self: getattr(self, public), doc=f"``{public}``, under the name that scripts for MXNet know."
    )


class ModuleNames:
    """Private names of MXNet's ``Module``."""

    @property
    def _total_exec_bytes(self) -> int:
        """Planned bytes of all executors."""
        module: Any = self
        return sum(executor.memory_plan.peak for executor in module.group.executors)

    @property
    def _grad_req(self) -> object:
        """The bound grad_req; None before ``bind``."""
        module: Any = self
        return module.bound_grad_req()

    @property
    def _data_shapes(self) -> object:
        """Bound data inputs; None before ``bind``."""
        module: Any = self
        return module.data_shapes if module.binded else None

    @property
    def _label_shapes(self) -> object:
        """Bound labels; None before ``bind``, or without labels, as ``bind(label_shapes=…)`` takes them."""
        module: Any = self
        return module.label_shapes or None if module.binded else None

    _params_dirty = False
    """Whether the executors hold newer parameters than the host; there is no such copy here."""

    def _sync_params_from_devices(self) -> None:
        """Do nothing: :meth:`get_params` copies from the devices."""


class GroupNames:
    """Names of MXNet's ``DataParallelExecutorGroup`` that scripts use through ``module._exec_group``."""

    data_shapes: list[Any]
    label_shapes: list[Any]
    executors: list[Any]
    slices: list[slice]
    _output_axes: list[int]

    @property
    def execs(self) -> list[Executor]:
        """The executors."""
        return self.executors

    @property
    def data_names(self) -> list[str]:
        """Names of the data inputs."""
        return [desc.name for desc in self.data_shapes]

    @property
    def label_names(self) -> list[str]:
        """Names of the labels."""
        return [desc.name for desc in self.label_shapes]

    @property
    def arg_names(self) -> list[str]:
        """Names of all arguments."""
        return list(self.executors[0].arg_dict)

    @property
    def data_arrays(self) -> list[list[tuple[slice, NDArray]]]:
        """For each data input, (slice of samples, array) per context."""
        return self._of(self.data_names)

    @property
    def label_arrays(self) -> list[list[tuple[slice, NDArray]]]:
        """The same for labels that the network reads."""
        return self._of(self.label_names)

    def _of(self, names: list[str]) -> list[list[tuple[slice, NDArray]]]:
        return [
            [(part, executor.arg_dict[name]) for part, executor in zip(self.slices, self.executors, strict=True)]
            for name in names
            if name in self.executors[0].arg_dict
        ]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""
        names: list[str] = self.executors[0].output_names
        return names

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return len(self.output_names)

    @property
    def data_layouts(self) -> list[int]:
        """The batch axis of each data input."""
        return [desc.batch_axis for desc in self.data_shapes]

    @property
    def label_layouts(self) -> list[int]:
        """The batch axis of each label."""
        return [desc.batch_axis for desc in self.label_shapes]

    @property
    def output_layouts(self) -> list[int]:
        """The batch axis of each output."""
        axes: list[int] = self._output_axes
        return axes

    def install_monitor(self, mon: Any) -> None:
        """Let ``mon`` watch every executor."""
        for executor in self.executors:
            mon.install(executor)

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        """Outputs of the last forward, of the whole batch or for each context."""
        group: Any = self
        return group.merged_outputs() if merge_multi_context else group.outputs()

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """Gradients of the data, of the whole batch or for each context."""
        group: Any = self
        return group.merged_input_grads() if merge_multi_context else group.input_grad_arrays

    def get_states(self, merge_multi_context: bool = True) -> Any:
        """States, of the whole batch or for each context."""
        group: Any = self
        return group.merged_states() if merge_multi_context else group.state_arrays

    def get_output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs of the whole batch."""
        group: Any = self
        shapes: list[tuple[int, ...]] = group.output_shapes()
        return shapes


for _private, _public in _OF_MODULE.items():
    setattr(ModuleNames, _private, _other_name(_public))
