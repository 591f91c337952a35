"""What a seat remembers of its server's lives, and tells the next one."""

from __future__ import annotations

from tensorhub.client.past import Past
from tensorhub.references import Claim, Content, LineageMark, Standing, Undertaking
from tensorhub.types import UNVERIFIED, Digest, Generation, Latest, Version

MAIN, RETRY, OTHER = LineageMark("main", 0, 1), LineageMark("retry", 1, 5), LineageMark("other", 2, 9)
CONTENT = Content(Digest(b"d" * 16), 1, 1, True)
GENERATION = Generation(b"g" * 16)


def told(past: Past, group: int = 7, sequence: int = 3, *, undertaking: Undertaking | None = None) -> Standing:
    return past.standing(group, sequence, (), undertaking)


def test_who_knows_nothing_says_so() -> None:
    """A fresh seat brings its numbers, and no version."""
    assert told(Past()) == Standing(7, 3, -1, None, None, None, (), None)


def test_the_newest_that_was_seen_counts() -> None:
    """Newer is a later lineage, then a higher number; what is given again, or older, changes nothing."""
    past = Past()
    for version, mark, newest in (
        (Version("main", 4), MAIN, Version("main", 4)),
        (Version("main", 9), MAIN, Version("main", 9)),
        (Version("main", 8), MAIN, Version("main", 9)),
        (Version("retry", 5), RETRY, Version("retry", 5)),
        (Version("main", 30), MAIN, Version("retry", 5)),
    ):
        past.saw(version, mark)
        assert told(past).seen == newest


def test_the_last_that_was_published_counts() -> None:
    """A publisher says what it published last, and where its lineage stands."""
    past = Past()
    past.published(Version("main", 4), MAIN)
    past.published(Version("main", 5), MAIN)
    standing = told(past)
    assert (standing.published, standing.seen, standing.lineages) == (Version("main", 5), None, (MAIN,))


def test_a_commit_counts_within_its_incarnation() -> None:
    """The last commit is told as long as the group is the one that committed."""
    past = Past()
    past.committed(7, 2, Version("main", 4))
    assert (told(past).committed_sequence, told(past).committed) == (2, Version("main", 4))
    assert (told(past, 8).committed_sequence, told(past, 8).committed) == (-1, None)


def test_lineages_are_told_in_their_order_and_forgotten_with_their_versions() -> None:
    """Only lineages of versions that are named are kept, however many there were; a mark is the last that was told."""
    past = Past()
    past.saw(Version("retry", 6), LineageMark("retry", 1, 6))
    past.published(Version("main", 4), MAIN)
    past.published(Version("retry", 6), RETRY)
    assert told(past).lineages == (RETRY,)
    past.saw(Version("other", 9), OTHER)
    undertaking = Undertaking(
        "a",
        Latest(),
        Version("main", 4),
        CONTENT,
        GENERATION,
        1,
        True,
        True,
        GENERATION,
        0,
        0,
        UNVERIFIED,
        (),
        b"",
        True,
    )
    claim = Claim("a", Version("main", 4), GENERATION, CONTENT, UNVERIFIED, True, 1, (), b"")
    past.saw(Version("other", 10), OTHER)
    assert told(past, undertaking=undertaking).lineages == (RETRY, OTHER), "main was forgotten"
    past = Past()
    past.saw(Version("main", 4), MAIN)
    past.saw(Version("retry", 5), RETRY)
    past.saw(Version("other", 9), OTHER)
    past.published(Version("retry", 5), RETRY)
    whole = past.standing(7, 3, (claim,), None)
    assert whole.lineages == (MAIN, RETRY, OTHER)
    assert told(past, undertaking=undertaking).lineages == (MAIN, RETRY, OTHER)
    assert told(past, undertaking=undertaking).undertaking == undertaking
    assert told(past).lineages == (RETRY, OTHER)
