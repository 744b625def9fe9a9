"""The identities that fence stale work (pure).

A request is one generation: a chat with n = 3 is three requests. Its id is 16 random bytes drawn by the API, so that no two
API processes can collide. A peer id is the routing id of one broker session and is never reused. Clients see neither: what
they see and what logs carry first is the label (`x-request-id`).
"""

from typing import NewType

RequestId = NewType("RequestId", bytes)
PeerId = NewType("PeerId", bytes)

ID_BYTES = 16


def shown(identity: bytes) -> str:
    """The form of a request or peer id in logs: its first eight hex digits, enough to grep by."""
    return identity[:4].hex()
