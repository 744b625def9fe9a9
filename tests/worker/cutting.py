"""What the tests of text machines share: every way of cutting a text."""

import itertools
import random
from collections.abc import Iterator

# 1024 ways at this length.
_ALL_UP_TO = 11


def cuts(text: str, all_up_to: int = _ALL_UP_TO) -> Iterator[list[str]]:
    """Every way of cutting a short text; a longer one at every two places, and into its characters."""
    inner = range(1, len(text))
    if len(text) <= all_up_to:
        marks = itertools.chain.from_iterable(itertools.combinations(inner, count) for count in range(len(text)))
    else:
        marks = itertools.chain([inner], itertools.combinations(inner, 2))
    for places in marks:
        yield [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


def random_cut(text: str, draw: random.Random) -> list[str]:
    """Pieces of one to six characters."""
    pieces = []
    while text:
        length = draw.randint(1, 6)
        pieces.append(text[:length])
        text = text[length:]
    return pieces
