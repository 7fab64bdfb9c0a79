"""The functions and operators that ``mx.sym`` shows."""
