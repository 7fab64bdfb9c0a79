"""``mx.log``: the handlers, levels and lines of MXNet 1.9.1."""

import logging

import pytest

import weftplan as mx


@pytest.fixture
def name():
    """Yield the name of a logger, and remove its handlers afterwards."""
    yield "weftplan-test-log"
    logger = logging.getLogger("weftplan-test-log")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger._is_configured = False


def test_a_file(name, tmp_path):
    """Messages at or above the level are appended as plain text; a later get_logger call changes nothing."""
    path = tmp_path / "run.log"
    path.write_text("before\n")
    logger = mx.log.get_logger(name, filename=path, level=mx.log.INFO)
    logger.info("hi")
    logger.debug("no")
    assert path.read_text() == "before\nhi\n"
    assert mx.log.get_logger(name, level=mx.log.DEBUG) is logger
    assert (logger.level, len(logger.handlers)) == (logging.INFO, 1)


def test_lines(name):
    """A line starts with the level's letter and colour, the time, the process and the place; exceptions follow.

    A level between two known levels has the letter U.
    """
    (handler,) = mx.log.get_logger(name).handlers
    record = logging.LogRecord("x", logging.WARNING, "/a/b.py", 7, "m %d", (3,), None, func="f")
    when = logging.Formatter(datefmt="%m%d %H:%M:%S").formatTime(record, "%m%d %H:%M:%S")
    for level, head in ((50, "31mC"), (40, "31mE"), (30, "31mW"), (20, "32mI"), (25, "32mU"), (10, "34mD")):
        record.levelno = level
        assert handler.format(record) == f"\x1b[{head}{when} {record.process} /a/b.py:f:7]\x1b[0m m 3"
    record.exc_info = (ValueError, ValueError("z"), None)
    assert handler.format(record).endswith("m 3\nValueError: z")


def test_without_a_name_and_by_the_old_one(name):
    """get_logger without a name returns the unchanged root logger; the old name getLogger warns."""
    before = list(logging.getLogger().handlers)
    assert mx.log.get_logger() is logging.getLogger()
    assert logging.getLogger().handlers == before
    with pytest.warns(DeprecationWarning, match="use get_logger"):
        assert mx.log.getLogger(name) is logging.getLogger(name)
