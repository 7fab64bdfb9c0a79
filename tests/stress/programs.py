"""Programs in processes of their own, for what must not hang or spoil the test process."""

import os
import subprocess
import sys
import textwrap

HANDLER = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Python's own, even where the shell ignores SIGINT, as it does for jobs in the background."""


def script(text, **environment):
    """Run a program in a process of its own; (exit status, output, errors)."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLER + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr
