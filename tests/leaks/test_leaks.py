"""After any failure at any step everything is as if the operation had not been, or as if it had ended well."""

from __future__ import annotations

import pytest

from tests.leaks.injection import Mode
from tests.leaks.operations import OPERATIONS, Operation
from tests.leaks.run import WAYS, places, run

#: Sites visited of each operation and way; every one is by `python -m tests.leaks`.
SITES_MAX = 2
#: Where the most can go wrong, more are visited.
SITES_OF_A_REPLICATE = 4
NAMED = {operation.name: operation for operation in OPERATIONS}
#: (operation, way): each operation is interrupted by its caller, and meets errors that nobody expects.
VISITS = [
    *((operation.name, Mode.CANCEL.value) for operation in OPERATIONS),
    *((operation.name, Mode.RAISE_LATE.value) for operation in OPERATIONS),
    *((name, Mode.CLOSE.value) for name in ("publish now", "unpublish drains", "replicate", "replicate re-routed")),
    *((name, Mode.CANCEL_LATE.value) for name in ("publish now", "unpublish drains", "replicate", "close")),
    *((name, Mode.RESTART.value) for name in ("publish now", "unpublish drains", "replicate", "suspend", "close")),
    *((name, "engine memory") for name in ("replicate", "suspend and resume", "register again", "close", "end")),
    *((name, "engine unavailable") for name in ("start", "replicate", "replicate re-routed", "suspend while read")),
]


def sample(operation: Operation, way: str) -> list[int]:
    """Places, 1-based, of as many sites as are visited, spread over the operation."""
    first = {site: at for at, site in reversed(list(enumerate(places(operation, way), 1)))}
    chosen = sorted(first.values())
    most = SITES_OF_A_REPLICATE if operation.name == "replicate" else SITES_MAX
    step = max(1, -(-len(chosen) // most))
    return chosen[step // 2 :: step]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), VISITS)
def test_a_failure_at_any_step_leaves_nothing_behind(name: str, way: str) -> None:
    """slept_source_withdrawn, no_advance_on_failure, register_failure_is_fatal: an operation that is cancelled, meets
    an unexpected error or a closed hub, at any await or engine call, ends in time; then leases, registrations and tasks
    are those of what the tensors hold, what they hold is whole or torn as said, and everybody goes on."""
    operation = NAMED[name]
    for at in sample(operation, way):
        verdict = run(operation, way, at)
        assert verdict.struck, "the same run has the same places"
        assert verdict.found == [], f"python -m tests.leaks '{name}' '{way}' {at}: {verdict.struck}"


def test_every_operation_has_places() -> None:
    """A harness that injects nothing proves nothing: the sites of a replicate are those of its whole data path."""
    sites = "\n".join(places(NAMED["replicate re-routed"], Mode.RAISE.value))
    for step in ("ask", "fetch_map", "_header", "_batch", "next", "commit", "_receive"):
        assert step in sites, step
    assert {"register", "deregister"} <= set(places(NAMED["register again"], "engine os"))
    assert set(WAYS) >= {way for _, way in VISITS}
