"""The first contact with a card, part by part; on the stand-in, with small sizes, in every run of the tests.

``python -m pytest -m gpu --first-contact`` runs it on a card and writes ``first-contact.md`` and ``.json``.
"""

import contextlib
import pathlib

import pytest

from tests.contract.devices import GPUS, place
from tests.first_contact.contact import Contact, Report, judge, machine_of
from tests.first_contact.parts import PARTS
from tests.standin_cudnn import cudnn
from tests.standin_cupy.nccl import nccl
from weftplan import device


@pytest.fixture(scope="module", params=GPUS)
def contact(request, tmp_path_factory):
    """(what parts are given, the report)."""
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
    """Each part passes, or says why it cannot run here."""
    actual, report = contact
    judge(report.run(part, actual))


def test_all_parts_are_over_within_ten_minutes():
    """The sum of their time limits is at most ten minutes."""
    assert sum(part.limit_s for part in PARTS) <= 10 * 60
