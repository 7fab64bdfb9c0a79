"""``python -m weftplan`` is the ``weftplan`` command."""

from weftplan.cli import main

if __name__ == "__main__":
    main()
