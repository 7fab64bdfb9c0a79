"""Mutants are valid programs, differ from the original, and are chosen independently of other lines."""

from __future__ import annotations

import ast

import pytest

from tests.stress import mutation

pytestmark = pytest.mark.stress


@pytest.mark.parametrize("area", mutation.AREAS)
def test_mutants_are_programs_with_one_mistake(area: str) -> None:
    """Names of mutants are unique, and each checked mutant parses and differs from its file."""
    mutants = list(mutation.mutants(area))
    assert len(mutants) > 200
    assert len({(mutant.path, mutant.name) for mutant in mutants}) == len(mutants)
    for mutant in mutants[::20]:
        source = (mutation.ROOT / mutant.path).read_bytes()
        mutated = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), mutant.name


def test_seed_chooses_mutants_by_name() -> None:
    """A line added above a function does not change the sort key of its mutants."""
    source = "def f(a, b):\n    return a < b + 1\n"
    before, after = (mutation.Sites("f.py", text) for text in (source, "x = 1\n" + source))
    for sites in (before, after):
        sites.visit(ast.parse(sites.source))
    ranks = [{mutant.name: mutant.rank("1") for mutant in sites.found} for sites in (before, after)]
    assert len(ranks[0]) == 4
    assert ranks[0].items() <= ranks[1].items()
