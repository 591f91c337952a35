"""The arithmetic of deadlines that the client's modules share."""

from __future__ import annotations

NS = 1_000_000_000
#: Beyond a call's own deadline, so that the server's refusal, which names the culprits, arrives before ours.
REPLY_MARGIN_S = 1.0
