"""Exception classes of weftplan, and formatting of names in messages.

All classes derive from :class:`MXNetError` (a ``RuntimeError``, as in MXNet), so ``except mx.MXNetError`` in an old
script still catches them. Each also derives from the built-in class that a Python reader expects. Messages state the
expected value, the received value (operator, variable, shape, device) and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 8


def listed(names: Iterable[object]) -> str:
    """Return names as a message shows them: all, or the first eight and the number of the others.

    >>> print(listed(["data", "weight"]), listed(range(160)))
    ['data', 'weight'] [0, 1, 2, 3, 4, 5, 6, 7, … 152 more]
    """
    every = list(names)
    if len(every) <= _LISTED:
        return str(every)
    return f"[{', '.join(map(repr, every[:_LISTED]))}, … {len(every) - _LISTED} more]"


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Return ``did you mean 'weight'? `` with the nearest name and a trailing space, or nothing if no name is near.

    >>> did_you_mean("wieght", ["data", "weight"]), did_you_mean("x", ["data", "weight"])
    ("did you mean 'weight'? ", '')
    """
    every = list(candidates)
    near = [same for same in _SAME.get(str(name), ()) if same in every]
    near = near or difflib.get_close_matches(str(name), every, n=1)
    near = near or [
        candidate
        for candidate in every
        if min(len(candidate), len(str(name))) > 2 and _begin_alike(str(name), candidate)
    ]
    return f"did you mean {near[0]!r}? " if near else ""


def _begin_alike(name: str, candidate: str) -> bool:
    return name.startswith(candidate) or candidate.startswith(name)


_SAME = {
    "Conv1D": ("Convolution",),
    "Conv2D": ("Convolution",),
    "Conv3D": ("Convolution",),
    "Conv2DTranspose": ("Deconvolution",),
    "ConvTranspose2d": ("Deconvolution",),
    "Dense": ("FullyConnected",),
    "GRU": ("RNN",),
    "LSTM": ("RNN",),
    "Linear": ("FullyConnected",),
    "AvgPool": ("Pooling",),
    "AvgPool2D": ("Pooling",),
    "MaxPool": ("Pooling",),
    "MaxPool2D": ("Pooling",),
    "MaxPooling2D": ("Pooling",),
    "BatchNormalization": ("BatchNorm",),
    "BatchNorm2d": ("BatchNorm",),
    "ReLU": ("relu",),
    "Sigmoid": ("sigmoid",),
    "Softmax": ("softmax",),
    "Tanh": ("tanh",),
    "callback": ("batch_end_callback",),
    "callbacks": ("batch_end_callback",),
    "context": ("ctx",),
    "ctx": ("context",),
    "data": ("train_data", "eval_data"),
    "dataset": ("train_data", "eval_data"),
    "device": ("context", "ctx"),
    "epoch": ("num_epoch",),
    "epochs": ("num_epoch",),
    "lr": ("learning_rate",),
    "memory": ("memory_budget", "budget"),
    "metrics": ("eval_metric",),
    "num_epochs": ("num_epoch",),
    "train": ("is_train", "for_training"),
    "training": ("train", "is_train", "for_training"),
    "val_data": ("eval_data",),
    "validation_data": ("eval_data",),
    "weight_decay": ("wd",),
    "workers": ("task_workers",),
}
"""Names of arguments in other libraries or other functions here, with ours."""


def shape_text(shape: Iterable[int] | None) -> str:
    """Return a shape as a message shows it, with ``?`` for an unknown dimension.

    >>> shape_text((32, 0, 3)), shape_text((0,)), shape_text(None)
    ('(32, ?, 3)', '(?,)', 'unknown')
    """
    if shape is None:
        return "unknown"
    dims = ["?" if dim == 0 else str(dim) for dim in shape]
    return f"({', '.join(dims)}{',' * (len(dims) == 1)})"


def own(error: Exception) -> Exception | None:
    """Return the ``__cause__`` for an error that repeats the whole message of ``error``: None if weftplan raised it.

    One failure then shows one traceback. An error from foreign code keeps its own, which tells its origin.
    """
    return None if isinstance(error, MXNetError) else error


class MXNetError(RuntimeError):
    """Base class of every error raised on purpose by weftplan."""


class ConfigError(MXNetError, ValueError):
    """An environment variable or option has an illegal value."""


class UndeclaredAccessWarning(UserWarning):
    """A task may write an array without declaring it; in debug mode also: it reaches an array that other tasks use."""


class ConfigWarning(UserWarning):
    """An environment variable is misspelt, or changed too late to have an effect."""


class DeviceError(MXNetError):
    """A device cannot be used: missing driver, missing package, or a bad index."""


class OutOfMemoryError(MXNetError, MemoryError):
    """A storage resource could not serve a request; the message holds a report."""


class GuardError(MXNetError):
    """Guard mode: an operation wrote outside its memory."""


class EngineError(MXNetError):
    """The engine was used in a forbidden way."""


class DuplicateVarError(EngineError, ValueError):
    """A var is both read and written, or written twice, by one operation."""


class WaitInWorkerError(EngineError):
    """An operation waited inside an engine worker, which could hang for ever."""


class UndeclaredWriteError(EngineError):
    """Debug mode: an operation wrote to an array that it declared as read."""


class ShapeError(MXNetError, ValueError):
    """Shapes conflict, are impossible or cannot be inferred."""


class ShapeTypeError(ShapeError, TypeError):
    """A shape, or a list of names and shapes, has another type."""


class DTypeError(MXNetError, TypeError):
    """A dtype conflicts or is not supported."""


class IndexRangeError(MXNetError, IndexError):
    """An index is out of range."""


class FixedAttributeError(MXNetError, AttributeError):
    """An attribute was assigned that describes an object and cannot change, such as the shape of an array."""


class UnknownOperatorError(MXNetError, AttributeError):
    """No operator has this name; the message lists similar names."""


class ParameterError(MXNetError, ValueError):
    """An operator parameter is missing, unknown or malformed."""


class KeywordError(ParameterError, TypeError):
    """A function or class does not accept a keyword argument; the message names the nearest and all."""


class ScheduledRateError(ParameterError, UserWarning):
    """A learning rate was set although a scheduler decides; a UserWarning that is raised, as in MXNet."""


class FormatError(MXNetError, ValueError):
    """A file or text (symbol JSON, .params, plan JSON) is truncated or malformed."""


class BindError(MXNetError, ValueError):
    """Arrays passed to bind do not fit the symbol."""


class PlanError(MXNetError):
    """A memory plan is impossible or failed validation; the message names the entries in conflict."""


class BudgetError(PlanError, ValueError):
    """No plan fits the memory budget; the message and :attr:`smallest` name the smallest budget that would."""

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest
        """Bytes of the smallest known budget that works, or None.

        The message repeats it without separators, for pasting.
        """


class KVStoreError(MXNetError):
    """A kvstore does not accept a key or value, or an exchange between processes failed."""


class WorkerLostError(KVStoreError):
    """A process that shares a distributed kvstore died or is unreachable."""


class DataError(MXNetError):
    """A sample is unreadable or unlike the others, or a data source has changed."""


class DataWorkerError(DataError):
    """A data worker process died, failed to start, or missed its deadline."""


class NotResumableError(MXNetError, NotImplementedError):
    """An iterator cannot report its position, so it cannot be resumed."""


class NotImplementedForSymbol(MXNetError, NotImplementedError):
    """An NDArray-only method was called on a Symbol."""
