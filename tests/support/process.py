"""Child processes for integration tests: a function of a test module runs in a fresh interpreter, with deadlines."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

#: A fresh interpreter with torch takes seconds on a busy machine; a hang must not take minutes.
ANSWER_S = 60.0


class Child:
    """A child that was told to run `main(pipe, *args)`."""

    def __init__(self, main: Callable[..., None], args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """The child's next word; an error when it died or is late."""
        if not self.pipe.poll(ANSWER_S):
            raise AssertionError(f"the child said nothing for {ANSWER_S} s")
        return self.pipe.recv()

    def tell(self, word: Any) -> None:
        self.pipe.send(word)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join(ANSWER_S)
        self.pipe.close()
        self.process.close()


@contextmanager
def child(main: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Run `main(pipe, *args)` in a fresh process; it is gone when the block ends."""
    started = Child(main, args)
    try:
        yield started
    finally:
        started.close()
