"""Which workers have read which beginnings of prompts (pure).

A prefix is the hashes of a prompt's head at growing lengths, shortest first, as the API made them; what was hashed is not
known here. What a worker has forgotten meanwhile is not known either: a wrong guess costs what no guess would.
Invariant: at most `most` hashes are kept, the least recently used goes first.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from common.ids import PeerId

HASH_BYTES = 8
# A prompt of 2,000 tokens has 16 hashes: the last five hundred prompts or so, about 2 MB.
MOST = 8192


class Prefixes:
    """Hash -> workers that were given a prompt which begins so, latest last."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, tuple[PeerId, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, prefix: bytes) -> Collection[PeerId]:
        """The workers that know the longest beginning which any of them knows."""
        for hash_ in reversed(list(_hashes(prefix))):
            found = self._holders.get(hash_)
            if found:
                return found
        return ()

    def given(self, prefix: bytes, peer: PeerId) -> None:
        """A worker was given this prompt."""
        for hash_ in _hashes(prefix):
            holders = self._holders.get(hash_, ())
            if peer not in holders:
                self._holders[hash_] = (*holders, peer)
            self._holders.move_to_end(hash_)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def forget(self, peer: PeerId) -> None:
        """A worker is gone or will take nothing more. Looks at everything: workers go rarely."""
        for hash_, holders in list(self._holders.items()):
            if peer in holders:
                rest = tuple(other for other in holders if other != peer)
                if rest:
                    self._holders[hash_] = rest
                else:
                    del self._holders[hash_]


def _hashes(prefix: bytes) -> Iterator[bytes]:
    return (prefix[at : at + HASH_BYTES] for at in range(0, len(prefix), HASH_BYTES))
