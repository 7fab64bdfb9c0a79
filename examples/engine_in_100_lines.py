"""A dependency engine to read in ten minutes: vars, queues of requests, and two worker threads.

    python examples/engine_in_100_lines.py

``push(function, reads, writes)`` returns immediately. The function runs on a worker thread after every earlier
operation that conflicts with it: reads of a var run concurrently, a write runs alone. A test compares results of random
programs with those of weftplan's engine. Errors, priorities, devices and waits for a single var are left out.
"""

import threading
from collections import deque


class Var:
    """One resource: the operations that use it now, and those that wait for it, in the order of the pushes."""

    def __init__(self):
        self.readers = 0  # operations that read it now
        self.writing = False  # whether an operation writes it now
        self.waiting = deque()  # (operation, whether it writes)
        self.version = 0  # finished writes

    def grant(self):
        """Remove requests from the front of the queue as long as the var allows, and return their operations."""
        granted = []
        while self.waiting and not self.writing:
            operation, writes = self.waiting[0]
            if writes and self.readers:
                break  # the last reader to finish calls this function again
            self.waiting.popleft()
            self.writing = writes
            self.readers += not writes
            granted.append(operation)
        return granted


class Operation:
    """A function with the vars that it reads and writes; it is ready when ``missing`` is 0."""

    def __init__(self, function, reads, writes):
        self.function, self.reads, self.writes, self.vars = function, reads, writes, (*reads, *writes)
        self.missing = len(self.vars) + 1  # one grant for each var, and one when it is registered with all of them


class Engine:
    """An engine that runs operations on worker threads as early as their vars allow."""

    def __init__(self, workers=2):
        self.lock = threading.Condition()  # all state changes inside it; functions run outside
        self.ready = deque()
        self.pending = 0
        for _ in range(workers):
            threading.Thread(target=self._work, daemon=True).start()

    def push(self, function, reads=(), writes=()):
        """Schedule a function after all earlier operations that conflict with it."""
        writes = set(writes)
        operation = Operation(function, set(reads) - writes, writes)
        with self.lock:
            self.pending += 1
            for var in operation.vars:
                var.waiting.append((operation, var in writes))
            self._grant(operation, *(other for var in operation.vars for other in var.grant()))

    def wait_for_all(self):
        """Block until no operation is pending."""
        with self.lock:
            self.lock.wait_for(lambda: self.pending == 0)

    def _grant(self, *granted):
        for operation in granted:
            operation.missing -= 1
            if operation.missing == 0:
                self.ready.append(operation)
                self.lock.notify_all()

    def _work(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.ready)
                operation = self.ready.popleft()
            operation.function()
            with self.lock:
                for var in operation.reads:
                    var.readers -= 1
                for var in operation.writes:
                    var.writing = False
                    var.version += 1
                self._grant(*(other for var in operation.vars for other in var.grant()))
                self.pending -= 1
                self.lock.notify_all()


if __name__ == "__main__":
    engine, a, b, log = Engine(), Var(), Var(), []
    engine.push(lambda: log.append("write a"), writes=[a])
    engine.push(lambda: log.append("read a, write b"), reads=[a], writes=[b])
    engine.push(lambda: log.append("write a again"), writes=[a])
    engine.wait_for_all()
    print(log, "versions", a.version, b.version)
