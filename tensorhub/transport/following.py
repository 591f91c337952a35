"""What engines that follow by themselves have in common: a course as C takes it, and what went wrong with a chunk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tensorhub import native
from tensorhub.ports import Course
from tensorhub.transport.crew import Crews

#: A course has no deadline of its own: as long as bytes come, it goes on.
NEVER_NS = (1 << 63) - 1


def followed(course: Course, stall_s: float) -> native.Follow:
    return native.Follow(
        course.numbers,
        course.done,
        course.told,
        course.whole,
        course.source_block,
        course.own_block,
        course.generation,
        int(stall_s * 1e9),
        course.is_verified,
    )


async def run_course(
    crews: Crews, work: Callable[[], None], cancel: Callable[[], None], threads: int, name: str
) -> None:
    """As `Crews.run`, in threads of its own: a course may last as long as its source's, and must hold up nobody."""
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        await crews.run(pool, work, cancel, threads, NEVER_NS)


def wrong_chunk(number: int) -> str:
    return f"it served wrong bytes: chunk {number} does not match its digest"
