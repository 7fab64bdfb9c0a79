"""``python -m weftplan`` is the command ``weftplan``.

It owns nothing and calls :func:`weftplan.cli.main` on the main thread.
"""

from weftplan.cli import main

if __name__ == "__main__":
    main()
