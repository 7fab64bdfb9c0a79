"""What the verbs of a symbol take and give. A test compares the keywords with those of the functions behind them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from weftplan.device.context import Context
from weftplan.executor import Executor
from weftplan.ndarray import NDArray
from weftplan.planner import MemoryPlan, PlanOptions

class Verbs:
    __slots__ = ()
    def bind(
        self,
        ctx: Context,
        args: Mapping[str, NDArray] | Sequence[NDArray],
        args_grad: Mapping[str, NDArray | None] | Sequence[NDArray | None] | None = ...,
        grad_req: str | Sequence[str] | Mapping[str, str] = ...,
        aux_states: Mapping[str, NDArray] | Sequence[NDArray] | None = ...,
        group2ctx: Mapping[str, Context] | None = ...,
        shared_exec: Executor | None = ...,
        *,
        options: PlanOptions | None = ...,
        plan_options: PlanOptions | None = ...,
    ) -> Executor: ...
    def simple_bind(
        self,
        ctx: Context,
        grad_req: str | Sequence[str] | Mapping[str, str] = ...,
        type_dict: Mapping[str, Any] | None = ...,
        stype_dict: Mapping[str, str] | None = ...,
        group2ctx: Mapping[str, Context] | None = ...,
        shared_arg_names: Sequence[str] | None = ...,
        shared_exec: Executor | None = ...,
        shared_buffer: dict[str, NDArray] | None = ...,
        *,
        budget: int | str | None = ...,
        dtype: Any = ...,
        options: PlanOptions | None = ...,
        memory_budget: int | str | None = ...,
        plan_options: PlanOptions | None = ...,
        **shapes: Sequence[int],
    ) -> Executor: ...
    def plan(
        self,
        shapes: Mapping[str, Sequence[int]] | None = ...,
        *,
        train: bool = ...,
        grad_req: str | Mapping[str, str] | None = ...,
        dtype: Any = ...,
        budget: int | str | None = ...,
        strategy: Literal["auto", "arena", "match_range", "none"] | None = ...,
        order: Literal["given", "best"] | None = ...,
        recompute: Literal["off", "mxnet", "echo", "sqrt", "cheap"] | None = ...,
        workspaces: bool = ...,
        context: Context | Sequence[Context] | None = ...,
        group2ctx: Mapping[str, Context] | None = ...,
        kvstore: Any = ...,
        workers: int | None = ...,
        optimizer: Any = ...,
        options: PlanOptions | None = ...,
        **more: Any,
    ) -> MemoryPlan: ...
    def eval(self, ctx: Context | None = ..., **kwargs: NDArray) -> list[NDArray]: ...
