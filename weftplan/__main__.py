"""``python -m weftplan``: the command ``weftplan``."""

from weftplan.cli import main

if __name__ == "__main__":
    main()
