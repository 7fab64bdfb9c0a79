"""A parser for the part of CUDA C that the package's kernels use.

It supports declarations, assignments, ``if``, ``for``, ``while``, ``break``, ``continue``, ``return``, functions, and
shared and local arrays of constant length. It supports all operators but the comma, and no addresses or pointers to
pointers. Other source raises :class:`CompileException`, as NVRTC does for invalid source.

Expressions and statements are trees of tuples: ``(kind, …)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


class CompileException(Exception):
    """An error for source that cannot be compiled."""


TYPES = {
    "void": "void",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
    "__half": "float16",
    "float": "float32",
    "double": "float64",
}
_WORDS = {word for name in TYPES for word in name.split()}
_QUALIFIERS = {"const", "__restrict__", "static", "inline", "__forceinline__", "__noinline__"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)[uUlLfF]*)
    |(?P<name>[A-Za-z_]\w*)|(?P<string>"[^"]*")
    |(?P<sign><<=|>>=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^~!<>=?:;,.(){}\[\]]))""",
    re.VERBOSE,
)
_ALIGNED = re.compile(r"\(\s*(?:const )?[\w ]+\*\s*\)\s*(__builtin_assume_aligned\b)")
"""A cast of a pointer to a promised alignment, which the interpreter checks."""
_BINARY = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!="], ["<", ">", "<=", ">="], ["<<", ">>"], ["+", "-"],
           ["*", "/", "%"]]  # fmt: skip
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}


@dataclass(frozen=True)
class Parameter:
    """A parameter: a value of a type, or a pointer to values of this type."""

    name: str
    type: str
    pointer: bool
    const: bool


@dataclass(frozen=True)
class Function:
    """A parsed function or kernel."""

    name: str
    result: str
    kernel: bool
    parameters: tuple[Parameter, ...]
    body: Any


def functions(source: str) -> dict[str, Function]:
    """Return all functions of a source text, by name."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    text = re.sub(r"^\s*#\s*(include\s*<cuda_fp16\.h>|pragma unroll)[^\n]*$", "", text, flags=re.MULTILINE)
    return _Reader(_tokens(_ALIGNED.sub(r"\1", text))).all()


def _tokens(text: str) -> list[str]:
    results, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise CompileException(f"cannot read {text[at : at + 40]!r}")
        results.append(match.group().strip())
        at = match.end()
    return results


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, wanted: str | None = None) -> str:
        actual = self.next
        if wanted is not None and actual != wanted:
            raise CompileException(
                f"expected {wanted!r}, got {actual!r} after {' '.join(self.tokens[self.at - 8 : self.at])!r}"
            )
        self.at += 1
        return actual

    def has(self, token: str) -> bool:
        if self.next == token:
            self.at += 1
            return True
        return False

    def all(self) -> dict[str, Function]:
        created: dict[str, Function] = {}
        while self.next:
            kernel = False
            while self.next in ("extern", '"C"', "__global__", "__device__"):
                kernel = self.take() == "__global__" or kernel
            result, _, _ = self.type()
            name = self.take()
            self.take("(")
            parameters = []
            while not self.has(")"):
                kind, const, pointer = self.type()
                parameters.append(Parameter(self.take(), kind, pointer, const))
                if self.next != ")":
                    self.take(",")
            created[name] = Function(name, result, kernel, tuple(parameters), self.block())
        return created

    def is_type(self) -> bool:
        return self.next in _WORDS or self.next in _QUALIFIERS

    def type(self) -> tuple[str, bool, bool]:
        """Parse a type; return (dtype, whether it is const, whether it is a pointer)."""
        words, const, pointer = [], False, False
        while self.is_type() or self.next == "*":
            word = self.take()
            if word == "*":
                pointer = True
            elif word in _QUALIFIERS:
                const = const or word == "const"
            else:
                words.append(word)
        name = " ".join(words)
        if name not in TYPES:
            raise CompileException(f"no type: {name or self.next!r}")
        return TYPES[name], const, pointer

    # -- statements ---------------------------------------------------------------------------------------------------

    def block(self) -> Any:
        self.take("{")
        results = []
        while not self.has("}"):
            results.append(self.statement())
        return ("block", results)

    def statement(self) -> Any:
        token = self.next
        if token == "{":
            return self.block()
        if token == "__shared__" or self.is_type():
            actual = self.declaration()
        elif token == "if":
            return self.branch()
        elif token == "for":
            return self.loop()
        elif token == "while":
            self.take()
            self.take("(")
            test = self.expression()
            self.take(")")
            return ("for", ("block", []), test, None, self.statement())
        elif token in ("break", "continue"):
            actual = (self.take(),)
        elif token == "return":
            self.take()
            actual = ("return", None if self.next == ";" else self.expression())
        else:
            actual = ("do", self.expression())
        self.take(";")
        return actual

    def branch(self) -> Any:
        self.take("if")
        self.take("(")
        test = self.expression()
        self.take(")")
        body = self.statement()
        return ("if", test, body, self.statement() if self.has("else") else ("block", []))

    def loop(self) -> Any:
        self.take("for")
        self.take("(")
        first: Any = ("block", [])
        if self.next != ";":
            first = self.declaration() if self.is_type() else ("do", self.expression())
        self.take(";")
        test = ("number", "1") if self.next == ";" else self.expression()
        self.take(";")
        step = None if self.next == ")" else self.expression()
        self.take(")")
        return ("for", first, test, step, self.statement())

    def declaration(self) -> Any:
        shared = self.has("__shared__")
        kind, _, pointer = self.type()
        results = []
        while True:
            name = self.take()
            if self.has("["):
                length = self.take()
                self.take("]")
                results.append(("array", kind, name, int(length), shared))
            else:
                results.append(("variable", kind, pointer, name, self.expression() if self.has("=") else None))
            if not self.has(","):
                return ("block", results)

    # -- expressions --------------------------------------------------------------------------------------------------

    def expression(self) -> Any:
        target = self.choice()
        if self.next in ASSIGNMENTS:
            sign = self.take()
            value = self.expression()
            return ("assign", target, value if sign == "=" else ("binary", sign[:-1], target, value))
        return target

    def choice(self) -> Any:
        test = self.binary(0)
        if not self.has("?"):
            return test
        yes = self.expression()
        self.take(":")
        return ("choose", test, yes, self.choice())

    def binary(self, level: int) -> Any:
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.next in _BINARY[level]:
            sign = self.take()
            left = ("binary", sign, left, self.binary(level + 1))
        return left

    def unary(self) -> Any:
        token = self.next
        if token in ("-", "+", "!", "~"):
            self.take()
            return ("unary", token, self.unary())
        if token in ("++", "--"):
            self.take()
            target = self.unary()
            return ("assign", target, ("binary", token[0], target, ("number", "1")))
        if token == "(":
            self.take()
            if self.is_type():
                kind, _, pointer = self.type()
                if pointer:
                    raise CompileException("casts of pointers are not read")
                self.take(")")
                return ("cast", kind, self.unary())
            actual = self.expression()
            self.take(")")
            return self.behind(actual)
        return self.behind(self.atom())

    def atom(self) -> Any:
        token = self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return ("number", token)
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise CompileException(
                f"no expression: {token!r} after {' '.join(self.tokens[self.at - 8 : self.at - 1])!r}"
            )
        if self.has("("):
            inputs = []
            while not self.has(")"):
                inputs.append(self.expression())
                if self.next != ")":
                    self.take(",")
            return ("call", token, inputs)
        return ("name", token)

    def behind(self, found: Any) -> Any:
        while True:
            if self.has("["):
                found = ("index", found, self.expression())
                self.take("]")
            elif self.has("."):
                found = ("member", found, self.take())
            elif self.next in ("++", "--"):
                sign = self.take()
                found = ("after", found, ("assign", found, ("binary", sign[0], found, ("number", "1"))))
            else:
                return found
