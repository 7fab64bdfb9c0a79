"""The decorator ``together`` runs many cases in one test and names the cases that fail."""

import os

import pytest

from tests.support import together as module
from tests.support.together import together


@pytest.fixture(autouse=True)
def in_one_test(monkeypatch):
    """Group cases even if the environment has TESTS_APART=1."""
    monkeypatch.setattr(module, "APART", False)


def test_every_case_runs_and_all_that_fail_are_named():
    """After a failing case the others run; the error group has the exception of each failed case with its name."""
    seen = []

    @together()
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize(("kind", "value"), [("a", 1.5), ("b", None)])
    def check(size, kind, value):
        seen.append((size, kind, value))
        assert size != 2 or kind != "a"
        if size == 3 and kind == "b":
            raise OSError("no")

    with pytest.raises(BaseExceptionGroup, match=r"2 of 6 cases failed: \[a-1\.5-2\], \[b-None-3\]") as caught:
        check(cases_of="all")
    assert sorted(seen) == sorted((s, k, v) for s in (1, 2, 3) for k, v in (("a", 1.5), ("b", None)))
    assert [type(error) for error in caught.value.exceptions] == [AssertionError, OSError]
    assert caught.value.exceptions[1].__notes__ == [f"in case [b-None-3] of {check.__qualname__}"]


def test_a_test_for_each_value():
    """``by`` groups the cases into one test per returned name, and fixtures are passed to the cases."""
    seen = []

    @together(by=lambda case: case[0])
    @pytest.mark.parametrize("case", [("add", 1), ("mul", 2), ("add", 3)], ids=str)
    def check(case, place):
        seen.append((place, case[1]))

    (mark,) = check.pytestmark
    assert mark.args == ("cases_of", ["add", "mul"])
    check(cases_of="add", place="here")
    assert seen == [("here", 1), ("here", 3)]
    check(cases_of="mul", place="there")
    assert seen[2:] == [("there", 2)]


@together()
@pytest.mark.parametrize("n", range(2))
def test_what_a_case_patches_is_gone_before_the_next(n, monkeypatch):
    """The patches of a case are undone before the next case."""
    assert "SEEN_BY_A_CASE" not in os.environ
    monkeypatch.setenv("SEEN_BY_A_CASE", str(n))


def test_a_case_may_be_skipped():
    """After a skipped case the others run; if all are skipped, the test is skipped with all reasons."""

    @together()
    @pytest.mark.parametrize("n", [0, 1])
    def some(n):
        if n == 0:
            pytest.skip("not here")
        pytest.fail("it ran")

    with pytest.raises(BaseExceptionGroup, match=r"1 of 2 cases failed: \[1\]"):
        some(cases_of="all")

    @together()
    @pytest.mark.parametrize("n", [0, 1])
    def none(n):
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match=r"\[0\] not here; \[1\] not here"):
        none(cases_of="all")


def test_apart_each_case_is_a_test(monkeypatch):
    """With APART each case is a separate test, as without the decorator."""
    monkeypatch.setattr(module, "APART", True)

    @together()
    @pytest.mark.parametrize("n", [0, 1])
    def check(n):
        """Do nothing."""

    assert [mark.args for mark in check.pytestmark] == [("n", [0, 1])]
