"""The two ends of every engine suite: each file says by its `case` which engines it is about."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
def source(case):
    opened = case.open_source()
    yield opened
    opened.end()


@pytest.fixture
def engine(case):
    opened = case.open_engine()
    yield opened
    asyncio.run(opened.close())
