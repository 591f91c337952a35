"""The secret that clients show a server in their Hello: where it is read from. Compares and sends nothing."""

from __future__ import annotations

import os
from pathlib import Path

from tensorhub.errors import BadRequest

TOKEN_ENV, TOKEN_FILE_ENV = "TENSORHUB_TOKEN", "TENSORHUB_TOKEN_FILE"
#: A secret, not a document: longer is the wrong file.
TOKEN_BYTES_MAX = 4096


def read_token(file: str | None = None) -> bytes:
    """The token in `file`, else in `$TENSORHUB_TOKEN`, else in the file that `$TENSORHUB_TOKEN_FILE` names, else b"".

    White space around it is not part of it. `BadRequest` for a file that cannot be read or holds no token.
    """
    if file is None and (token := os.environ.get(TOKEN_ENV, "").strip()):
        return _checked(os.fsencode(token), f"${TOKEN_ENV}")
    path = file or os.environ.get(TOKEN_FILE_ENV)
    if not path:
        return b""
    try:
        with Path(path).open("rb") as opened:
            return _checked(opened.read(TOKEN_BYTES_MAX + 2).strip(), f"token file {path!r}")
    except OSError as error:
        raise BadRequest(f"token file {path!r} cannot be read: {error.strerror or error}") from error


def _checked(token: bytes, where: str) -> bytes:
    if not token:
        raise BadRequest(f"{where} is empty; put a token into it, or name no file")
    if len(token) > TOKEN_BYTES_MAX:
        raise BadRequest(f"{where} is longer than {TOKEN_BYTES_MAX} bytes: that is no token")
    return token
