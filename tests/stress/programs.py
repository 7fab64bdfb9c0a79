"""Programs in processes of their own, for what must not hang or spoil the test process."""

import os
import subprocess
import sys
import textwrap


def script(text, **environment):
    """Run a program in a process of its own; (exit status, output, errors)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr
