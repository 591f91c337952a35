"""Trainers that gather every parameter before they hand it on: here they hand on what each rank has.

Frameworks call `DTensor.full_tensor()` for each parameter, on every rank, so that every byte goes to every rank first.
`tensorhub.Staging` publishes rows as well as whole tensors, so none has to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

#: One at a time: what is replaced is a method of a class of torch's.
_lock = threading.Lock()


@contextmanager
def ungathered(wanted: bool = True) -> Iterator[None]:
    """While it lasts, `full_tensor()` on this thread returns the distributed tensor itself; elsewhere it gathers."""
    if not wanted:
        yield
        return
    thread = threading.get_ident()
    with _lock:
        real = DTensor.full_tensor  # never another thread's replacement

        def full_tensor(self: DTensor, **options: Any) -> Any:
            return self if threading.get_ident() == thread else real(self, **options)

        DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
        try:
            yield
        finally:
            DTensor.full_tensor = real  # type: ignore[method-assign]
