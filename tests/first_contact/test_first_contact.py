"""The first contact with a GPU, part by part; a normal test run uses the stand-in GPU and small sizes.

``python -m pytest -m gpu --first-contact`` runs it on a real GPU and writes ``first-contact.md`` and ``.json``.
"""

import contextlib
import pathlib

import pytest

from tests.contract.devices import GPUS, place
from tests.first_contact.contact import Contact, Report, machine_of, raise_outcome
from tests.first_contact.parts import PARTS
from tests.standin_cudnn import cudnn
from tests.standin_cupy.nccl import nccl
from weftplan import device


@pytest.fixture(scope="module", params=GPUS)
def contact(request, tmp_path_factory):
    """Return (Contact, Report) for the stand-in or a real GPU."""
    where = request.param
    with contextlib.ExitStack() as stack:
        if where == "standin":
            stack.enter_context(cudnn())
        context = stack.enter_context(place(where))
        if where == "standin":
            stack.enter_context(nccl())
        actual = Contact(context, device.num_gpus(), small=where == "standin")
        folder = tmp_path_factory.mktemp("contact") if where == "standin" else pathlib.Path()
        report = Report(folder / "first-contact", machine_of(actual))
        yield actual, report
        if where == "standin":
            assert report.path.with_suffix(".md").stat().st_size < 20_000


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_first_contact(contact, part):
    """A part passes, or is skipped with a reason."""
    actual, report = contact
    raise_outcome(report.run(part, actual))


def test_all_parts_are_over_within_ten_minutes():
    """The time limits of all parts add up to at most ten minutes."""
    assert sum(part.limit_s for part in PARTS) <= 10 * 60
