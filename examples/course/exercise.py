"""The exercise: make planned memory safe on an engine that runs steps out of order.

Write ``before``. Then ``python -m pytest examples/course/grade.py`` grades this file.
To grade your copy: ``EXERCISE=my_file.py python -m pytest examples/course/grade.py``.
"""

from memory_plan import Plan


def before(plan: Plan) -> list[set[int]]:
    """Return, for each step, the steps that must finish before it may start.

    These are its inputs, and every step that still needs the bytes of its result. Order no
    two steps that neither depend on each other nor meet on a byte.
    """
    raise NotImplementedError("which earlier steps use the bytes of this step's result?")
