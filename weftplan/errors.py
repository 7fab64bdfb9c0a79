"""Every exception class that weftplan raises, and how messages show names.

All of them derive from :class:`MXNetError` (a ``RuntimeError``, as in MXNet), so ``except mx.MXNetError`` in an old
script still catches them; each also derives from the built-in class that a Python reader would expect.
Messages say what was expected, what came (operator, variable, shape, device) and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LISTED = 8


def listed(names: Iterable[object]) -> str:
    """Names as a message shows them: all, or the first eight and how many more there are.

    >>> print(listed(["data", "weight"]), listed(range(160)))
    ['data', 'weight'] [0, 1, 2, 3, 4, 5, 6, 7, … 152 more]
    """
    every = list(names)
    if len(every) <= _LISTED:
        return str(every)
    return f"[{', '.join(map(repr, every[:_LISTED]))}, … {len(every) - _LISTED} more]"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``did you mean 'weight'? `` with the nearest name, and a space for what follows; nothing when none is near.

    >>> did_you_mean("wieght", ["data", "weight"]), did_you_mean("x", ["data", "weight"])
    ("did you mean 'weight'? ", '')
    """
    every = list(known)
    near = [same for same in _SAME.get(str(name), ()) if same in every]
    near = near or difflib.get_close_matches(str(name), every, n=1)
    near = near or [one for one in every if min(len(one), len(str(name))) > 2 and _begin_alike(str(name), one)]
    return f"did you mean {near[0]!r}? " if near else ""


def _begin_alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


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
"""What other libraries, or other functions here, call an argument."""


def shape_text(shape: Iterable[int] | None) -> str:
    """A shape as a message shows it, ``?`` for a dimension that is not known.

    >>> shape_text((32, 0, 3)), shape_text((0,)), shape_text(None)
    ('(32, ?, 3)', '(?,)', 'unknown')
    """
    if shape is None:
        return "unknown"
    dims = ["?" if dim == 0 else str(dim) for dim in shape]
    return f"({', '.join(dims)}{',' * (len(dims) == 1)})"


def own(error: Exception) -> Exception | None:
    """The cause of an error that repeats the whole message of ``error``: none where weftplan raised that on purpose.

    One failure is then one traceback. What somebody else's code raised keeps its own, which says where.
    """
    return None if isinstance(error, MXNetError) else error


class MXNetError(RuntimeError):
    """Base class of every error raised on purpose by weftplan."""


class ConfigError(MXNetError, ValueError):
    """An environment variable or option has an illegal value."""


class UndeclaredAccessWarning(UserWarning):
    """Debug mode: a task reaches an array that other tasks use, and has not declared it."""


class ConfigWarning(UserWarning):
    """A misspelt environment variable, or one that changed too late to matter."""


class DeviceError(MXNetError):
    """A device cannot be used: missing driver, missing package, or a bad index."""


class OutOfMemoryError(MXNetError, MemoryError):
    """A storage resource could not serve a request; the message holds a report."""


class GuardError(MXNetError):
    """Guard mode has found that an operation wrote outside of its memory."""


class EngineError(MXNetError):
    """The engine was used in a way that it forbids."""


class DuplicateVarError(EngineError, ValueError):
    """A var is both read and written, or written twice, by one operation."""


class WaitInWorkerError(EngineError):
    """An operation waited inside an engine worker, which could hang for ever."""


class UndeclaredWriteError(EngineError):
    """Debug mode: an operation wrote to an array that it declared as read."""


class ShapeError(MXNetError, ValueError):
    """Shapes conflict, are impossible or cannot be inferred."""


class ShapeTypeError(ShapeError, TypeError):
    """What should be a shape, or a list of names and shapes, is something else."""


class DTypeError(MXNetError, TypeError):
    """A dtype conflicts or is not supported."""


class IndexRangeError(MXNetError, IndexError):
    """An index names an element that is not there."""


class UnknownOperatorError(MXNetError, AttributeError):
    """No operator has this name; the message lists near names."""


class ParameterError(MXNetError, ValueError):
    """An operator parameter is missing, unknown or malformed."""


class KeywordError(ParameterError, TypeError):
    """A function or class does not have the keyword argument that it got; the message names the nearest and all."""


class ScheduledRateError(ParameterError, UserWarning):
    """A learning rate was set although a scheduler decides; a UserWarning that is raised, as in MXNet."""


class FormatError(MXNetError, ValueError):
    """A file or text (symbol JSON, .params, plan JSON) is truncated or malformed."""


class BindError(MXNetError, ValueError):
    """Arrays given to bind do not fit the symbol."""


class PlanError(MXNetError):
    """A memory plan is impossible or failed validation; names the entries that clash."""


class BudgetError(PlanError, ValueError):
    """No plan fits the memory budget; the message names the smallest that would, and so does :attr:`smallest`."""

    def __init__(self, message: str, *, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest
        """Bytes of the smallest budget found that works; None where it is not known. Alone among a message's numbers it
        has no separators: it is there to be pasted as the next budget."""


class KVStoreError(MXNetError):
    """A key or value given to a kvstore is not acceptable, or an exchange between processes failed."""


class WorkerLostError(KVStoreError):
    """A process that shares a distributed kvstore died, or cannot be reached any more."""


class DataError(MXNetError):
    """A sample cannot be read or is unlike the others, or a source of data has changed."""


class DataWorkerError(DataError):
    """A process that reads samples died, could not begin, or missed its deadline."""


class NotResumableError(MXNetError, NotImplementedError):
    """An iterator cannot say where it stands, so that nobody can go on from there."""


class NotImplementedForSymbol(MXNetError, NotImplementedError):
    """An NDArray-only method was called on a Symbol."""
