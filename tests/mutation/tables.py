"""Which fast tests judge the mutants of which module: the nearest first, as the first failure ends the run."""

from __future__ import annotations

SERVER = "tests/unit/server"
PIPELINE = "tests/unit/pipeline"

#: {module: files or folders}; tests marked slow are left out.
TESTS: dict[str, tuple[str, ...]] = {
    "tensorhub.server.grace": (f"{SERVER}/test_returning.py", f"{SERVER}/test_versions.py"),
    "tensorhub.server.deadlines": (f"{SERVER}/test_deadlines.py",),
    "tensorhub.client.past": ("tests/unit/client/test_past.py",),
    "tensorhub.server.versions": (
        f"{SERVER}/test_versions.py",
        f"{SERVER}/test_returning.py",
        f"{SERVER}/test_lifecycles.py",
    ),
    "tensorhub.server.roots": (f"{SERVER}/test_versions.py", f"{SERVER}/test_returning.py", f"{SERVER}/test_groups.py"),
    "tensorhub.pipeline.counter": (f"{PIPELINE}/test_counter.py",),
    "tensorhub.pipeline.exposure": (f"{PIPELINE}/test_exposure.py",),
    "tensorhub.pipeline.plan": (f"{PIPELINE}/test_plan.py",),
    "tensorhub.server.offers": (
        f"{SERVER}/test_listing.py",
        f"{SERVER}/test_offers.py",
        f"{SERVER}/test_graph.py",
        f"{SERVER}/test_placement.py",
        f"{SERVER}/test_lifecycles.py",
    ),
    "tensorhub.server.placement": (
        f"{SERVER}/test_choice.py",
        f"{SERVER}/test_placement.py",
        f"{SERVER}/test_graph.py",
        f"{SERVER}/test_offers.py",
    ),
    "tensorhub.server.pace": (f"{SERVER}/test_pace.py",),
    "tensorhub.server.stragglers": (f"{SERVER}/test_stragglers.py",),
    "tensorhub.server.rates": (f"{SERVER}/test_pace.py",),
    "tensorhub.server.lateness": (
        f"{SERVER}/test_groups.py",
        f"{SERVER}/test_sessions.py",
        f"{SERVER}/test_returning.py",
    ),
    "tensorhub.server.origins": (f"{SERVER}/test_origins.py",),
    "tensorhub.pipeline.course": (f"{PIPELINE}/test_course.py", f"{PIPELINE}/test_filling.py"),
    "tensorhub.server.groups": (
        f"{SERVER}/test_group_calls.py",
        f"{SERVER}/test_groups.py",
        f"{SERVER}/test_lifecycles.py",
        f"{SERVER}/test_hostile.py",
        f"{SERVER}/test_returning_transfers.py",
        f"{SERVER}/test_origins.py",
        f"{SERVER}/test_stragglers.py",
    ),
    "tensorhub.server.returning": (
        f"{SERVER}/test_returning_claims.py",
        f"{SERVER}/test_returning_transfers.py",
        f"{SERVER}/test_returning.py",
        f"{SERVER}/test_hostile.py",
    ),
}
