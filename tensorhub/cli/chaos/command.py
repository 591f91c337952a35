"""`tensorhub chaos`: the cases one after the other, in a folder of their own that is gone at the end, and the report.

It decides in which order things end: processes before the folder, and both before an interruption goes on.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tensorhub.cli.chaos import cases, rig, view
from tensorhub.cli.chaos.record import Outcome
from tensorhub.cli.chaos.servers import KINDS, settings
from tensorhub.errors import BadRequest

SEED_BELOW = 2**31
REPORT_COLUMNS = 160


def run(server: str, mib: int, only: str, seed: int | None, *, as_json: bool) -> bool:
    """Run the cases that `only` names (commas; all if empty) and print the report; whether none of them failed."""
    chosen = cases.choose([name.strip() for name in only.split(",") if name.strip()])
    if server not in KINDS:
        raise BadRequest(
            f"--server {server!r}: chaos kills its server, so it starts one of its own: {', '.join(KINDS)}"
        )
    seed = secrets.randbelow(SEED_BELOW) if seed is None else seed
    console = Console(stderr=as_json)
    shown: view.LiveView | view.PlainView
    if console.is_terminal and not as_json:
        shown = view.LiveView(console, chosen)
    else:
        shown = view.PlainView(None if as_json else console)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tensorhub-chaos-") as folder, shown:
        # Before the first process starts: they all inherit it.
        os.environ.update(settings(Path(folder), rig.LEASE_SECONDS, rig.BEAT_SECONDS, rig.STALL_SECONDS))
        places = [cases.place_of(case, server, Path(folder), mib, seed) for case in chosen]
        for case, place in zip(chosen, places, strict=True):
            shown.begin(case)
            outcomes.append(cases.run(case, place, shown.progress))
            shown.done(outcomes[-1])
    if as_json:
        document = {"seed": seed, "server": server, "mib": mib, "cases": [found.as_json() for found in outcomes]}
        sys.stdout.write(json.dumps({"ok": all(found.ok for found in outcomes)} | document, indent=2) + "\n")
    else:
        wide = console if console.is_terminal else Console(width=REPORT_COLUMNS)
        wide.print(view.report(outcomes))
        wide.print(view.last_words(outcomes, seed), markup=False, highlight=False, soft_wrap=True)
    return all(found.ok for found in outcomes)


def show_cases(*, as_json: bool) -> None:
    """What there is, without running anything."""
    if as_json:
        told = [{"case": case.name, "did": case.did, "must": case.must} for case in cases.CASES.values()]
        sys.stdout.write(json.dumps({"cases": told}, indent=2) + "\n")
        return
    console = Console()
    wide = console if console.is_terminal else Console(width=REPORT_COLUMNS)
    wide.print(view.case_list(_everything()))


def _everything() -> Sequence[cases.Case]:
    return list(cases.CASES.values())
