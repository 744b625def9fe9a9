"""Which workers have read which beginnings of prompts (pure).

Prefixes are as in common/prefix. A prompt counts as read from its first token on: of two that come together each must be
read, and two workers do that at once. What a worker has forgotten meanwhile is not known: a wrong guess costs what no guess would.
Invariant: at most `most` hashes are kept, the least recently used goes first.
"""

from collections import OrderedDict
from collections.abc import Iterator

from common.ids import PeerId
from common.prefix import HASH_BYTES, lengths

# A prompt of 2,000 tokens has 16 hashes: the last five hundred prompts or so, about 2 MB.
MOST = 8192
_LENGTHS = tuple(lengths())


class Prefixes:
    """Hash -> workers that have read a prompt which begins so."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._readers: OrderedDict[bytes, tuple[PeerId, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._readers)

    def read(self, prefix: bytes) -> dict[PeerId, int]:
        """How many tokens of this prompt's head each worker has read; those that have read none are left out."""
        found: dict[PeerId, int] = {}
        for hash_, length in zip(_hashes(prefix), _LENGTHS, strict=False):
            for peer in self._readers.get(hash_, ()):
                found[peer] = length
        return found

    def readers(self) -> set[PeerId]:
        """All workers that have read anything, for checks."""
        return {peer for readers in self._readers.values() for peer in readers}

    def add(self, prefix: bytes, peer: PeerId) -> None:
        """A worker has read this prompt."""
        for hash_ in _hashes(prefix):
            readers = self._readers.get(hash_, ())
            if peer not in readers:
                self._readers[hash_] = (*readers, peer)
            self._readers.move_to_end(hash_)
        while len(self._readers) > self._most:
            self._readers.popitem(last=False)

    def forget(self, peer: PeerId) -> None:
        """A worker is gone or will take nothing more. Looks at everything: workers go rarely."""
        for hash_, readers in list(self._readers.items()):
            if peer in readers:
                rest = tuple(other for other in readers if other != peer)
                if rest:
                    self._readers[hash_] = rest
                else:
                    del self._readers[hash_]


def _hashes(prefix: bytes) -> Iterator[bytes]:
    return (prefix[at : at + HASH_BYTES] for at in range(0, len(prefix), HASH_BYTES))
