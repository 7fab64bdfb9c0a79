"""Write the symbols that ``interchange.py`` lets MXNet 1.9.1 load: ``python tests/golden/write_ours.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import interchange_cases as cases

from weftplan import models

FOLDER = Path(__file__).parent / "interchange"


def main() -> None:
    """Write one symbol file per network."""
    FOLDER.mkdir(exist_ok=True)
    for name in cases.OURS:
        models.digits(name).save(FOLDER / f"ours-{name}-symbol.json")
        print(name)


if __name__ == "__main__":
    main()
