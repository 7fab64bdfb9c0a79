"""Record the calls of ``hook_cases.py`` in MXNet 1.9.1 as ``data/hooks.json``: different lines, and scripts as numbers.

/path/to/mxnet-environment/bin/python tests/golden/hooks.py
"""

import json
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def main():
    """Write the file."""
    import hook_cases
    import mxnet as mx

    if mx.__version__ != "1.9.1":
        raise SystemExit(f"expected MXNet 1.9.1, this is {mx.__version__}")
    warnings.simplefilter("ignore")
    table, scripts = {}, {}
    for script in hook_cases.SCRIPTS:
        scripts[script.__name__] = [table.setdefault(line, len(table)) for line in hook_cases.play(mx, script)]
    lines = ",\n".join(map(json.dumps, table))
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in scripts.items())
    path = pathlib.Path(__file__).resolve().parent / "data" / "hooks.json"
    path.write_text(f'{{"lines": [\n{lines}],\n"scripts": {{\n{rows}}}}}\n')
    print(f"{path.name}: {len(scripts)} scripts, {len(table)} lines, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
