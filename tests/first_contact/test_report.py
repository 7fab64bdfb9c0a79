"""The run of the first contact: errors that stop it, failed and skipped parts, and the page."""

import json
import threading

import pytest

from tests.contract.devices import place
from tests.first_contact.contact import Contact, Part, Report, Skip, machine_of
from tests.standin_cupy import machine
from weftplan import device


@pytest.fixture
def contact():
    """Return a Contact of four stand-in GPUs."""
    with place("standin") as context:
        yield Contact(context, 4, small=True)


def run_add_kernel(contact):
    """Run a kernel and wait for it; a part that passes."""
    contact.at("the kernel add")
    gpu = device.get(contact.context(0))
    x = gpu.allocate(16)
    gpu.xp.add(x, 1, out=x)
    contact.settle()


def test_it_stops_at_an_error_that_stays(contact, tmp_path):
    """After an illegal access no further part is run; the page names the kernel and the parts not reached."""
    report = Report(tmp_path / "page", machine_of(contact))
    report.run(Part("good", 30, run_add_kernel), contact)
    machine.faulty["add"] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    report.run(Part("bad", 30, run_add_kernel), contact)
    report.run(Part("later", 30, run_add_kernel), contact)
    assert [one.state for one in report.results] == ["passed", "failed", "not reached"]
    assert "the kernel add" in report.stopped
    assert "IllegalAddress" in report.stopped
    page = (tmp_path / "page.md").read_text()
    assert "**Stopped: CUDA answers no call since the kernel add" in page
    assert "| later | not reached |" in page
    loaded = json.loads((tmp_path / "page.json").read_text())
    assert [one["state"] for one in loaded["parts"]] == ["passed", "failed", "not reached"]
    assert loaded["machine"]["GPU"] == "4 x stand-in"


def test_it_continues_after_a_failed_part(contact):
    """After a failed and a skipped part the next part runs; the page has the reasons."""
    report = Report(None, {})

    def wrong(contact):
        contact.at("operator exp")
        raise AssertionError("0.1 apart")

    def absent(contact):
        raise Skip("there is one GPU")

    for run in (wrong, absent, run_add_kernel):
        report.run(Part(run.__name__, 30, run), contact)
    assert [one.state for one in report.results] == ["failed", "skipped", "passed"]
    assert "| wrong | failed |" in report.markdown()
    assert "at operator exp; AssertionError: 0.1 apart" in report.markdown()
    assert "there is one GPU" in report.markdown()
    assert not report.stopped


def test_it_stops_at_a_part_that_hangs(contact):
    """A part that exceeds its time limit is abandoned, and no other part runs."""
    report, over = Report(None, {}), threading.Event()

    def hang(contact):
        contact.at("an event")
        over.wait(60)

    report.run(Part("hang", 0.2, hang), contact)
    over.set()
    report.run(Part("next", 30, run_add_kernel), contact)
    assert [one.state for one in report.results] == ["failed", "not reached"]
    assert report.stopped == "hang hangs at an event"
