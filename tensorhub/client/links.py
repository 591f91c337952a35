"""From the address that users write to the link that reaches it. Decides nothing but which adapter an address names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.ports import Link
from tensorhub.wire.local_place import DEFAULT_NAME, check_local_name

FORMS = "'local', 'local:NAME', 'ray://NAME', 'grpc://HOST:PORT', 'grpcs://HOST:PORT' or 'frames://HOST:PORT'"
#: {scheme: (module, function of the address that gives its link)}; loaded when first named.
_REMOTE = {
    "ray": ("tensorhub.client.ray_link", "ray_link"),
    "grpc": ("tensorhub.client.grpc_link", "grpc_link"),
    "grpcs": ("tensorhub.client.grpc_link", "grpc_link"),
    "frames": ("tensorhub.client.frame_link", "frame_link"),
}


def parse_server(address: str, *, may_start: bool = True) -> Link:
    """The link to `address`; `BadRequest` for what is no address, `ServerUnavailable` for what this build lacks.

    Where clients start the server (`local`, `ray`), a link that may not says `NoServer` instead.
    """
    if address == "local":
        return _local(address, DEFAULT_NAME, may_start)
    if address.startswith("local:"):
        return _local(address, check_local_name(address.removeprefix("local:")), may_start)
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or scheme not in _REMOTE:
        raise BadRequest(f"server address {address!r} is none; write {FORMS}")
    module_name, function = _REMOTE[scheme]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ServerUnavailable(
            f"server {address!r}: this build has no {scheme}:// (no module {error.name!r}); "
            f"install it by: pip install '.[{scheme.removesuffix('s')}]' in a checkout of TensorHub"
        ) from error
    if scheme == "ray":
        return cast(Callable[[str, bool], Link], getattr(module, function))(address, may_start)
    return cast(Callable[[str], Link], getattr(module, function))(address)


def _local(address: str, name: str, may_start: bool) -> Link:
    from tensorhub.client.local_link import LocalLink

    return LocalLink(address, name, may_start)
