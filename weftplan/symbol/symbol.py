"""``Symbol``, the class that users hold: a list of entries of a graph.

A symbol owns only the list of its outputs. Nodes are shared between symbols; once composed, a node never changes except
for its attributes and, for a variable, its count of writers. Verbs of higher layers (bind, plan) come through
``verbs.py``. Any thread may read a symbol; only one thread at a time may change it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from weftplan.errors import FormatError, NotImplementedForSymbol, ParameterError, did_you_mean, listed
from weftplan.ops.core import registry
from weftplan.support import slots
from weftplan.support.array_types import DTypeLike
from weftplan.support.atomic_files import open_to_read, other_kind, write_text
from weftplan.symbol import attribute, json_io
from weftplan.symbol.arithmetic import Arithmetic
from weftplan.symbol.compose import parse_interned, substitute
from weftplan.symbol.inference.methods import Inference
from weftplan.symbol.node import Entry, Node, copy_graph, split_variables, topological_order
from weftplan.symbol.verbs import Verbs

if TYPE_CHECKING:
    from weftplan.symbol.registered import Methods
else:
    Methods = object

_NDARRAY_ONLY = frozenset(
    {"wait_to_read", "wait_to_write", "asnumpy", "asscalar", "copy", "as_in_context", "detach", "backward"}
)


class Symbol(Inference, Arithmetic, Verbs, Methods):
    """One or several outputs of a graph, to be composed, inspected, saved, planned and bound.

    Symbols never change; they share their nodes.

    Args:
        entries: the outputs, in order.
    """

    __slots__ = ("__weakref__", "cached_plans", "entries")

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: list[Entry] = list(entries)
        self.cached_plans: Any = None
        """Executors' cached data for this symbol, with the symbol's lifetime."""

    # ------------------------------------------------------------------------------------------------------- names

    @property
    def name(self) -> str | None:
        """The node's name; None for a group of several nodes."""
        node = self._node()
        return None if node is None else node.name

    def list_outputs(self) -> list[str]:
        """Return the names of the outputs: ``<node>_<output>``, or a variable's own name."""
        return [output_name(entry) for entry in self.entries]

    def list_inputs(self) -> list[str]:
        """Return the names of all variables, arguments and auxiliary states, in depth-first order."""
        return [node.name for node in self._nodes() if node.op is None]

    def list_arguments(self) -> list[str]:
        """Return the names of the variables that are not auxiliary states, in depth-first order."""
        return [node.name for node in self._variables()[0]]

    def list_auxiliary_states(self) -> list[str]:
        """Return the names of the variables that some operator writes to, in depth-first order."""
        return [node.name for node in self._variables()[1]]

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return len(self.entries)

    def _nodes(self) -> list[Node]:
        return topological_order(self.entries)

    def _node(self) -> Node | None:
        node = self.entries[0].node
        return node if all(entry.node is node for entry in self.entries) else None

    def _variables(self) -> tuple[list[Node], list[Node]]:
        """Return (arguments, auxiliary states)."""
        return split_variables(self._nodes())

    # --------------------------------------------------------------------------------------------------- structure

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Symbol]:
        return (Symbol([entry]) for entry in self.entries)

    def __getitem__(self, index: int | str | slice) -> Symbol:
        """Return an output by position or by name, or a group by slice.

        Raises:
            IndexError: no output has this position.
            ValueError: no output, or more than one, has this name.
        """
        if isinstance(index, str):
            names = self.list_outputs()
            positions = [i for i, output in enumerate(names) if output == index]
            if len(positions) != 1:
                problem = "no output is" if not positions else f"{len(positions)} outputs are"
                hint = did_you_mean(index, names) if not positions else ""
                if not positions and f"{index}_output" in names:  # a node's name instead of its output's
                    hint = f"did you mean '{index}_output'? "
                raise ParameterError(f"{problem} called {index!r}; {hint}outputs: {listed(names)}")
            return Symbol([self.entries[positions[0]]])
        if isinstance(index, slice):
            chosen = self.entries[index]
            if not chosen:
                raise IndexError(f"slice {index} of a symbol with {len(self)} output(s) is empty")
            return Symbol(chosen)
        if not 0 <= index < len(self.entries):
            raise IndexError(f"output {index} of a symbol with {len(self)} output(s)")
        return Symbol([self.entries[index]])

    def get_internals(self) -> Symbol:
        """Return a group of every node's visible outputs, including variables, in depth-first order."""
        return Symbol(Entry(node, i, node.version) for node in self._nodes() for i in range(node.num_visible_outputs))

    def get_children(self) -> Symbol | None:
        """Return a group of the direct inputs of the outputs' nodes; None if there are none."""
        heads = dict.fromkeys(entry.node for entry in self.entries)
        children = [entry for node in heads for entry in node.inputs]
        return Symbol(children) if children else None

    def __call__(self, *args: Symbol, **kwargs: Symbol) -> Symbol:
        """Return a copy with variables replaced by symbols, by position or by name; ``name`` renames the copy.

        Raises:
            TypeError: a value is no symbol, or positions and names are mixed.
            ParameterError: a value has several outputs, or no variable has that name.
        """
        name: Any = kwargs.pop("name", None)
        what = repr(self)
        heads = substitute(
            self.entries,
            [single(value, f"composing {what}: input {i}") for i, value in enumerate(args)],
            {key: single(value, f"composing {what}: {key}") for key, value in kwargs.items()},
            what,
            name,
        )
        return Symbol(heads)

    def __copy__(self) -> Symbol:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, object]) -> Symbol:
        return Symbol(copy_graph(self.entries))

    def __reduce__(self) -> tuple[Callable[[str], Symbol], tuple[str]]:
        return (load_json, (self.tojson(),))

    def __repr__(self) -> str:
        name = self.name
        if name is not None:
            return f"<Symbol {name}>"
        shown = ", ".join(entry.node.name for entry in self.entries[:50])
        return f"<Symbol group [{shown}{', ...' if len(self) > 50 else ''}]>"

    # -------------------------------------------------------------------------------------------------- attributes

    def attr(self, key: str) -> str | None:
        """Return a node attribute, ``name`` or ``op_name`` (``"null"`` for a variable); hidden names may be short."""
        node = self._node()
        if node is None:
            return None
        if key == "name":
            return node.name
        if key == "op_name":
            return "null" if node.op is None else node.op.saved_as or node.op.name
        if key == "_value_index":
            return str(self.entries[0].index)
        value = node.attrs.get(key)
        if value is None and key in attribute.HIDDEN_KEYS:
            value = node.attrs.get(f"__{key}__")
        return value

    def list_attr(self, recursive: bool = False) -> dict[str, str]:
        """Return the node's attributes, hidden attributes under both names; empty for a group of several nodes."""
        if recursive:
            raise DeprecationWarning("list_attr(recursive=True) is gone from MXNet; use attr_dict()")
        node = self._node()
        return {} if node is None else attribute.with_short_forms(node.attrs)

    def attr_dict(self) -> dict[str, dict[str, str]]:
        """Return attributes of every node that has any, by node name; hidden attributes appear under both names."""
        return {node.name: attribute.with_short_forms(node.attrs) for node in self._nodes() if node.attrs}

    def _set_attr(self, **attributes: str) -> None:
        """Set attributes of this symbol's single node; parameters are parsed again.

        Raises:
            ParameterError: a group, a value that is not text, or a parameter that does not parse.
        """
        node = self._node()
        if node is None:
            raise ParameterError(f"attributes can be set on one node only, not on {self!r}")
        changed = dict(node.attrs)
        for key, value in attributes.items():
            if not isinstance(value, str):
                raise ParameterError(f"attribute {key!r} of {node.name!r} must be text, got {value!r}")
            if key in attribute.HIDDEN_KEYS:
                changed[f"__{key}__"] = value
            else:
                changed[attribute.stored_key(key, repr(node.name))] = value
        params = node.params if node.op is None else parse_interned(node.op, changed, node=node.name)
        node.attrs, node.params = changed, params

    # --------------------------------------------------------------------------------------------------- operators

    def _attribute(self, name: str) -> Callable[..., object]:
        """Every registered operator is a method: ``x.reshape(shape=(2, 3))``."""
        if name in _NDARRAY_ONLY:
            return partial(_refuse, name)
        if not name.startswith("__") and registry.contains(name):
            return partial(slots.SYMBOL_OPERATOR.get()(name), self)
        raise AttributeError(f"Symbol has no attribute {name!r}, and no operator is called so")

    if not TYPE_CHECKING:  # for a type checker a method that no operator has is an error
        __getattr__ = _attribute

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *_NDARRAY_ONLY, *(n for n in registry.names() if not n.startswith("_"))})

    def astype(self, dtype: DTypeLike) -> Symbol:
        """Cast this symbol to another dtype."""
        result: Symbol = slots.SYMBOL_OPERATOR.get()("cast")(self, dtype=dtype)
        return result

    def expand_dims(self, axis: int, inplace: bool = False, **kwargs: object) -> Symbol:
        """Insert an axis of length 1, as ``sym.expand_dims``.

        Args:
            axis: position of the new axis.
            inplace: ignored, since the planner decides.
            **kwargs: further arguments of the operator.
        """
        result: Symbol = slots.SYMBOL_OPERATOR.get()("expand_dims")(self, axis=axis, **kwargs)
        return result

    def flatten(self, inplace: bool = False, **kwargs: object) -> Symbol:
        """Merge all axes but the first, as ``sym.flatten``; ``inplace`` is ignored."""
        result: Symbol = slots.SYMBOL_OPERATOR.get()("flatten")(self, **kwargs)
        return result

    def squeeze(self, axis: int | Sequence[int] | None = None, inplace: bool = False, **kwargs: object) -> Symbol:
        """Drop axes of length 1, as ``sym.squeeze``.

        Args:
            axis: the axes; None: all of length 1.
            inplace: ignored, since the planner decides.
            **kwargs: further arguments of the operator.
        """
        result: Symbol = slots.SYMBOL_OPERATOR.get()("squeeze")(self, axis=axis, **kwargs)
        return result

    def split_v2(
        self,
        indices_or_sections: int | Sequence[int],
        axis: int = 0,
        squeeze_axis: bool = False,
        name: str | None = None,
    ) -> Symbol:
        """Split into equal sections along ``axis``, or at the given indices, as ``sym.split_v2(x, …)``.

        Args:
            indices_or_sections: number of equal sections, or the indices at which sections begin.
            axis: axis to split.
            squeeze_axis: drop the axis, if each section has length 1.
            name: name of the node; None: an automatic name.
        """
        split = slots.SYMBOL_SPLIT.get()
        result: Symbol = split(self, indices_or_sections, axis, squeeze_axis, name)
        return result

    # ------------------------------------------------------------------------------------------------------- files

    def tojson(self, remove_amp_cast: bool = True) -> str:
        """Return the graph as JSON text in the format of MXNet 1.9.1.

        ``remove_amp_cast`` is accepted and has no effect: ``amp_cast`` nodes, which MXNet omits, are kept, so that the
        loaded graph computes the same results.
        """
        return json_io.dumps(self.entries)

    def save(self, fname: str | os.PathLike[str], remove_amp_cast: bool = True) -> None:
        """Write :meth:`tojson` to a file atomically."""
        write_text(fname, self.tojson())

    def debug_str(self) -> str:
        """Return the graph as text, one paragraph per node."""
        return json_io.debug_text(self.entries)


def output_name(entry: Entry) -> str:
    """Return a variable's name, else ``<node>_<output>`` (only the output's name for a nameless node)."""
    node = entry.node
    if node.op is None:
        return node.name
    output = node.op.output_names(node.params)[entry.index]
    return f"{node.name}_{output}" if node.name else output


def single(value: object, what: str) -> Entry:
    """Return the entry of a symbol with one output.

    Raises:
        TypeError: not a symbol.
        ParameterError: a symbol with several outputs.
    """
    if not isinstance(value, Symbol):
        raise TypeError(f"{what}: expected a Symbol, got {type(value).__name__}")
    if len(value.entries) != 1:
        raise ParameterError(f"{what}: expected one output, {value!r} has {len(value)}; pick one by index")
    return value.entries[0]


def Group(symbols: Iterable[Symbol], create_fn: Callable[[Iterable[Entry]], Symbol] = Symbol) -> Symbol:
    """Group several symbols into one symbol with all their outputs.

    Raises:
        TypeError: the list is empty or contains another type.
    """
    members = list(symbols)
    if not members or not all(isinstance(member, Symbol) for member in members):
        raise TypeError(f"Group expects a non-empty list of symbols, got {[type(m).__name__ for m in members]}")
    return create_fn(entry for member in members for entry in member.entries)


def load_json(json_str: str, where: str = "symbol JSON") -> Symbol:
    """Load a symbol from JSON text of any MXNet release up to 1.x; ``where`` names its source in messages.

    Raises:
        FormatError: truncated, malformed or cyclic.
        UnknownOperatorError: an operator that does not exist here; names the node.
        ParameterError: an operator's parameters do not parse.
    """
    if not isinstance(json_str, str):
        raise TypeError(f"load_json expects text, got {type(json_str).__name__}")
    return Symbol(json_io.loads(json_str, where))


def load(fname: str | os.PathLike[str]) -> Symbol:
    """Load a symbol from a ``-symbol.json`` file; raises as :func:`load_json`, and OSError."""
    with open_to_read(fname) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = other_kind(content[:64]) or f"not UTF-8 text ({error}); expected a -symbol.json file"
        if content.startswith(_PARAMS):
            what = "it is a file of parameters, which mx.nd.load opens; the symbol is in a -symbol.json file"
        raise FormatError(f"{os.fspath(fname)}: {what}") from error
    return Symbol(json_io.loads(text, where=os.fspath(fname)))


_PARAMS = b"\x12\x01\x00\x00\x00\x00\x00\x00"
"""The first bytes of array files."""


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedForSymbol(f"{name} needs data, which a symbol has not: bind it, use the executor's outputs")
