"""Programs in separate processes, for tests that must not hang or affect the test process."""

import os
import subprocess
import sys
import textwrap

HANDLER = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Source that installs Python's SIGINT handler, since a shell's background jobs ignore SIGINT."""


def script(text, **environment):
    """Run a program in its own process; return its exit status, output and error output."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLER + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr
