"""What a special token is to the text machines (pure).

Markers of reasoning and tool calls are often made of special tokens, which an engine leaves out of its text. The router
writes each as one stand-in, a lone surrogate, which decoded text cannot hold; so a marker is found, a parser sees what
it needs, and a special token that formed no marker is gone without a trace. Must never know what a marker means.
Invariant: what hidden() and spelled() give holds no stand-in.
"""

import re
from collections.abc import Mapping

_FIRST, _LAST = 0xD800, 0xDFFF
MOST = _LAST - _FIRST + 1
_STAND_IN = re.compile("[\ud800-\udfff]")


class Router:
    """The special tokens of one model; shared by all its requests."""

    def __init__(self, specials: Mapping[int, str] | None = None) -> None:
        """specials: token id -> how it is written, at most MOST of them. The others stay without text."""
        specials = specials or {}
        assert len(specials) <= MOST and all(specials.values())
        self._stand_ins = {token: chr(_FIRST + index) for index, token in enumerate(specials)}
        self._texts = {chr(_FIRST + index): text for index, text in enumerate(specials.values())}
        # Longest first: <|a|> must not be taken out of <|a|>b if that is a token too.
        self._longest_first = sorted(self._texts.items(), key=lambda one: -len(one[1]))
        self._forms: dict[str, list[str]] = {}

    def written(self, token: int) -> str:
        """The stand-in of a special token; "" for any other."""
        return self._stand_ins.get(token, "")

    def hidden(self, text: str) -> str:
        """Without the stand-ins."""
        return _STAND_IN.sub("", text)

    def spelled(self, text: str) -> str:
        """With every special token as it is written."""
        return _STAND_IN.sub(lambda found: self._texts.get(found[0], ""), text)

    def forms(self, marker: str) -> list[str]:
        """A marker as it may come: spelled in letters, or with stand-ins for its special tokens."""
        if marker not in self._forms:
            # Remembered: a vocabulary may have hundreds of special tokens, and every request asks for the same markers.
            coded = marker
            for stand_in, text in self._longest_first:
                coded = coded.replace(text, stand_in)
            self._forms[marker] = [marker] if coded == marker else [marker, coded]
        return self._forms[marker]
