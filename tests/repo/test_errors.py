"""The error tree: drawn as it is, and every error survives the ways it travels."""

from __future__ import annotations

import inspect
import pickle

import pytest

from tensorhub import errors
from tensorhub.errors import TensorHubError, Where

PLACE = Where("actor", 7, "rollout-1", 2, 4, "trainer#2", "layers.0.weight", 4096)


def drawn(docstring: str) -> dict[str, str]:
    """{class: parent} as the tree in a docstring draws it."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in docstring.splitlines():
        words = line.replace("├──", "   ").replace("└──", "   ").replace("│", " ").split()
        if not words or words[0] not in vars(errors) or not ("──" in line or line.strip() == "TensorHubError"):
            continue
        depth = line.index(words[0])
        while path and path[-1][0] >= depth:
            path.pop()
        if path:
            parents[words[0]] = path[-1][1]
        path.append((depth, words[0]))
    return parents


def test_drawing_equals_the_class_tree() -> None:
    """The tree at the top of errors.py shows every error below its parent, and no other."""
    real = {name: cls.__mro__[1].__name__ for name, cls in errors.BY_NAME.items() if cls is not TensorHubError}
    assert drawn(inspect.getdoc(errors) or "") == real


def test_by_name_holds_every_error() -> None:
    """Errors cross the wire by name: none is missing from the table."""
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, TensorHubError)
    }
    assert set(errors.BY_NAME) == defined


@pytest.mark.parametrize("name", sorted(errors.BY_NAME))
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickle(name: str, protocol: int) -> None:
    """Class, message, place and text are the same after a pickle round trip."""
    error = errors.BY_NAME[name]("what happened; what to do", PLACE)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert (type(again), again.message, again.where, str(again)) == (type(error), error.message, PLACE, str(error))


@pytest.mark.parametrize("name", sorted(errors.BY_NAME))
def test_errors_survive_pickle_after_their_place_is_filled(name: str) -> None:
    """What an outer layer adds to the place travels, too."""
    error = errors.BY_NAME[name]("what happened", Where(shard=2)).at(PLACE)
    again = pickle.loads(pickle.dumps(error))
    assert again.where == PLACE
    assert str(again) == str(error)


def test_every_field_of_a_place_is_told() -> None:
    """An error names model, version, replica, shard, source, tensor and bytes done when it knows them."""
    text = str(TensorHubError("gone", PLACE))
    for part in ("'actor'", "version 7", "'rollout-1'", "shard 2 of 4", "'trainer#2'", "'layers.0.weight'", "4096"):
        assert part in text
    assert str(TensorHubError("gone")) == "gone"
