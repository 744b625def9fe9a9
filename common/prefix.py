"""At which lengths a prompt's head is hashed, so that API and broker mean the same by a prefix (pure).

A prefix is one hash of HASH_BYTES after the other, for heads of growing length, the shortest first. The API makes the hashes;
the broker only compares them, and counts the tokens that two prompts have in common by how many they share.
"""

from collections.abc import Iterator

HASH_BYTES = 8
# Enough tokens to tell one system prompt from another; reading fewer again costs nothing to speak of.
BLOCK = 64
# Reached beyond a million tokens.
MOST_HASHES = 64


def lengths() -> Iterator[int]:
    """64 tokens, then longer by 64 or, from 512 on, by an eighth to a quarter: 32 of them up to 32,768."""
    length = BLOCK
    for _ in range(MOST_HASHES):
        yield length
        length += max(BLOCK, 1 << (length.bit_length() - 3))
