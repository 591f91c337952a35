"""The server's views as rich tables for people and as JSON for programs. Decides only how they look.

In JSON every id and digest is hex, every duration keeps its unit in its name, and nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tensorhub.cli.units import size
from tensorhub.messages import StatusView, VersionView
from tensorhub.types import Location, Seat

NO_VERSION = "no version is held"
#: Names in one cell; the count says how many there are.
NAMES_SHOWN = 4


def as_json(value: object) -> Any:
    """Plain JSON values of a view: bytes as hex, tuples as lists, dataclasses as objects by field name."""
    match value:
        case bytes():
            return value.hex()
        case Location():
            return str(value)
        case tuple() | list():
            return [as_json(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value


def versions_part(versions: Sequence[VersionView]) -> RenderableType:
    """The table, or a sentence: an empty frame reads like a fault."""
    return versions_table(versions) if versions else NO_VERSION


def versions_table(versions: Iterable[VersionView]) -> Table:
    table = Table(title="versions", title_justify="left")
    for heading in ("model", "version", "state", "shards", "bytes", "complete", "partial", "readers", "verified"):
        table.add_column(heading)
    for row in versions:
        table.add_row(
            str(row.model),
            str(row.version),
            row.state,
            str(row.shards),
            size(row.nbytes),
            _names(row.complete),
            _names(row.partial),
            str(row.readers),
            "yes" if row.verified else "no",
        )
    return table


def status_parts(status: StatusView) -> list[RenderableType]:
    """Versions, holdings, sessions and waits: a table of each that has rows; no version is a sentence."""
    holdings = Table(title="holdings", title_justify="left")
    for heading in (
        "model",
        "seat",
        "set",
        "version",
        "state",
        "watermark",
        "bytes",
        "pulls from",
        "over",
        "read by",
        "place",
    ):
        holdings.add_column(heading)
    for row in status.holdings:
        holdings.add_row(
            str(row.seat.model),
            _seat(row.seat, row.shards),
            row.buffers,
            str(row.version),
            row.state,
            f"{row.watermark}/{row.chunks}",
            size(row.nbytes),
            row.upstream or "-",
            row.route or "-",
            _names(row.readers),
            " ".join(part for part in (str(row.location), "spot" if row.spot else "") if part) or "-",
        )
    sessions = Table(title=f"sessions (server life {status.epoch.hex()[:8]})", title_justify="left")
    for heading in ("session", "host", "pid", "seats", "lease left"):
        sessions.add_column(heading)
    for session in status.sessions:
        sessions.add_row(
            session.session.hex()[:8],
            session.host,
            str(session.pid),
            _names([f"{seat.model} {seat}" for seat in session.seats]),
            f"{session.lease_left_ns / 1e9:.1f} s",
        )
    parts = [versions_part(status.versions), *(table for table in (holdings, sessions) if table.row_count)]
    if status.waiting:
        waits = Table(title="waiting", title_justify="left")
        for heading in ("who", "for what", "left"):
            waits.add_column(heading)
        for wait in status.waiting:
            waits.add_row(wait.who, wait.what, f"{wait.left_ns / 1e9:.1f} s")
        parts.append(waits)
    return parts


def _seat(seat: Seat, shards: int) -> str:
    return f"{seat.replica}#{seat.shard}/{shards}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:NAMES_SHOWN])
    if len(listed) > NAMES_SHOWN:
        return f"{shown} (+{len(listed) - NAMES_SHOWN})"
    return shown or "-"
