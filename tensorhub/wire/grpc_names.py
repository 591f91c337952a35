"""The names by which both ends of a gRPC stream find each other. Decides nothing, and imports nothing."""

from __future__ import annotations

SERVICE = "tensorhub.wire.ReferenceServer"
METHOD = f"/{SERVICE}/Session"
#: In the initial metadata of a stream that was accepted. Without it the stream's status says why not: the library
#: hands over empty metadata for a refusal, too, and may do so before the status.
ACCEPTED = "tensorhub-accepted"
