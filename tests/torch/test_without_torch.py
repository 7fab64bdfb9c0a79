"""Without PyTorch the package can be imported, and errors say what to install."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["torch"] = None
import weftplan.torch
from weftplan.cli import main
print(sorted(weftplan.torch.__all__))
for name in ("budget", "nonsense"):
    try:
        getattr(weftplan.torch, name)
    except (ModuleNotFoundError, AttributeError) as error:
        print(error)
from click.testing import CliRunner
found = CliRunner().invoke(main, ["plan", "--torch", "platform:uname"])
print(found.exit_code, found.output)
"""


def test_errors_say_what_to_install() -> None:
    """Without PyTorch, access to a function raises an error with the install command.

    A step of the command line that does not need PyTorch is checked as usual.
    """
    actual = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert "['backend', 'budget', 'curve', 'estimate', 'fits'" in actual
    assert "weftplan.torch needs PyTorch: pip install 'weftplan[torch]'" in actual
    assert "has no attribute 'nonsense'" in actual
    assert "must return (loss, arguments)" in actual


def test_nothing_else_imports_torch() -> None:
    """Importing the package and its command line does not import PyTorch."""
    script = "import sys, weftplan, weftplan.cli, weftplan.torch; print('torch' in sys.modules)"
    actual = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert actual.strip() == "False"
