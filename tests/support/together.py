"""Many small cases in one test, because a separate test costs a few milliseconds more than its case.

Every case runs, even after a failure, and the message names all failed cases. With ``TESTS_APART=1`` every case is a
separate test, which ``-k`` can select and ``--lf`` remembers.
"""

import inspect
import itertools
import os
from contextlib import nullcontext

import pytest

APART = os.environ.get("TESTS_APART") == "1"


def together(by=None):
    """Return a decorator that runs the cases of the ``parametrize`` decorators below it in few tests.

    ``by`` maps a case's arguments, by name, to the name of its test; without it all cases are one test. A case has its
    own ``monkeypatch``; other fixtures are those of the test.
    """

    def decorate(function):
        if APART:
            return function
        marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
        cases = [_joined(parts) for parts in itertools.product(*map(_cases, marks))]
        groups: dict[str, list] = {}
        for name, arguments in cases:
            groups.setdefault("all" if by is None else by(**_asked(by, arguments)), []).append((name, arguments))
        parameters = inspect.signature(function).parameters
        patched = "monkeypatch" in parameters

        def run(*self, cases_of, **fixtures):
            failures, skipped = {}, []
            for name, arguments in groups[cases_of]:
                with pytest.MonkeyPatch.context() if patched else nullcontext() as monkeypatch:
                    try:
                        function(*self, **fixtures, **arguments, **({"monkeypatch": monkeypatch} if patched else {}))
                    except pytest.skip.Exception as why:
                        skipped.append(f"[{name}] {why}")
                    except (Exception, pytest.fail.Exception) as error:
                        error.add_note(f"in case [{name}] of {function.__qualname__}")
                        failures[name] = error
            if failures:
                named = ", ".join(f"[{name}]" for name in failures)
                raise BaseExceptionGroup(
                    f"{len(failures)} of {len(groups[cases_of])} cases failed: {named}", list(failures.values())
                )
            if len(skipped) == len(groups[cases_of]):
                pytest.skip("; ".join(skipped))

        provided = {"monkeypatch", *cases[0][1]}
        kept = [parameter for name, parameter in parameters.items() if name not in provided]
        run.__signature__ = inspect.Signature(
            [*kept, inspect.Parameter("cases_of", inspect.Parameter.KEYWORD_ONLY)], __validate_parameters__=False
        )
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(run, name, getattr(function, name))
        run.pytestmark = [mark for mark in function.pytestmark if mark.name != "parametrize"]
        run.cases = cases
        return pytest.mark.parametrize("cases_of", list(groups))(run)

    return decorate


def _cases(mark):
    """Return (name, arguments) of each case of one ``parametrize``, named as in pytest."""
    names, values = mark.args
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    ids = mark.kwargs.get("ids")
    named_cases = []
    for index, value in enumerate(values):
        assert not hasattr(value, "marks"), "a case with marks of its own needs a test of its own"
        row = (value,) if len(names) == 1 else tuple(value)
        arguments = dict(zip(names, row, strict=True))
        if ids is not None and not callable(ids):
            name = list(ids)[index]
        else:
            name = "-".join((ids and ids(part)) or _name(part, f"{key}{index}") for key, part in arguments.items())
        named_cases.append((name, arguments))
    return named_cases


def _name(value, otherwise):
    """Return pytest's name of a value, or ``otherwise`` if pytest would number it."""
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    return getattr(value, "__name__", otherwise)


def operator(case):
    """Return the operator of an operator test's case: its first item, or its ``op``."""
    return case["op"] if isinstance(case, dict) else case[0]


def _joined(parts):
    """Return the merged name and arguments of one case from each of several decorators."""
    return "-".join(name for name, _ in parts), {key: value for _, inputs in parts for key, value in inputs.items()}


def _asked(by, arguments):
    """Return the arguments that ``by`` accepts."""
    return {name: arguments[name] for name in inspect.signature(by).parameters}
