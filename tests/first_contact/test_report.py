"""The run of the first contact: reasons to stop, skipped parts, and the page."""

import json
import threading

import pytest

from tests.contract.devices import place
from tests.first_contact.contact import Contact, Part, Report, Skip, machine_of
from tests.standin_cupy import machine
from weftplan import device


@pytest.fixture
def contact():
    """On the stand-in."""
    with place("standin") as context:
        yield Contact(context, 4, small=True)


def add(contact):
    """A kernel, waited for."""
    contact.at("the kernel add")
    gpu = device.get(contact.context(0))
    x = gpu.allocate(16)
    gpu.xp.add(x, 1, out=x)
    contact.settle()


def test_it_stops_at_an_error_that_stays(contact, tmp_path):
    """Every later call reports an illegal access: the page names the kernel and the parts that did not run."""
    report = Report(tmp_path / "page", machine_of(contact))
    report.run(Part("good", 30, add), contact)
    machine.faulty["add"] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    report.run(Part("bad", 30, add), contact)
    report.run(Part("later", 30, add), contact)
    assert [one.state for one in report.results] == ["passed", "failed", "not reached"]
    assert "the kernel add" in report.stopped
    assert "IllegalAddress" in report.stopped
    page = (tmp_path / "page.md").read_text()
    assert "**Stopped: CUDA answers no call since the kernel add" in page
    assert "| later | not reached |" in page
    loaded = json.loads((tmp_path / "page.json").read_text())
    assert [one["state"] for one in loaded["parts"]] == ["passed", "failed", "not reached"]
    assert loaded["machine"]["GPU"] == "4 x stand-in"


def test_it_goes_on_behind_a_wrong_value(contact):
    """A part that fails, or cannot run here, says why, and the next one runs."""
    report = Report(None, {})

    def wrong(contact):
        contact.at("operator exp")
        raise AssertionError("0.1 apart")

    def absent(contact):
        raise Skip("there is one GPU")

    for run in (wrong, absent, add):
        report.run(Part(run.__name__, 30, run), contact)
    assert [one.state for one in report.results] == ["failed", "skipped", "passed"]
    assert "| wrong | failed |" in report.markdown()
    assert "at operator exp; AssertionError: 0.1 apart" in report.markdown()
    assert "there is one GPU" in report.markdown()
    assert not report.stopped


def test_it_stops_at_a_part_that_hangs(contact):
    """A hanging part is abandoned after its time limit; no other part runs."""
    report, over = Report(None, {}), threading.Event()

    def hang(contact):
        contact.at("an event")
        over.wait(60)

    report.run(Part("hang", 0.2, hang), contact)
    over.set()
    report.run(Part("next", 30, add), contact)
    assert [one.state for one in report.results] == ["failed", "not reached"]
    assert report.stopped == "hang hangs at an event"
