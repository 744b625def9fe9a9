"""A model's tokenizer as the API uses it: text to ids and back, with or without special tokens.

Wraps the tokenizers library; transformers is never needed. Thread-safe: nothing but one lazy copy is made after
construction. Invariant: encode_guarded() never turns a guarded stretch into a special token.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from api.special_text import Span, any_of

# Characters of a token, seldom more on average: longer texts are looked at twice.
USUAL_LONGEST = 8
STRETCH = 65536
# What cutting a text may add to the count at each cut.
STRETCH_ERROR = 4


class Tokens:
    """Encodes and decodes. added: text of every added token -> its id; special: those that mark turns and the like."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tokenizer = Tokenizer.from_file(str(file))
        self._bare: Tokenizer | None = None
        self._lock = threading.Lock()
        # Some published files carry these; a prompt is never cut or filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        flags = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: identity for identity, token in flags.items()}
        self.special = frozenset(token.content for token in flags.values() if token.special)
        self._eats_right = frozenset(token.content for token in flags.values() if token.rstrip)
        self._eats_left = frozenset(token.content for token in flags.values() if token.lstrip)
        self._pattern = any_of(self.added)
        # One past the largest id: some vocabularies have gaps.
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.longest = max((len(self._tokenizer.id_to_token(i) or "") for i in range(self.size)), default=1) or 1
        self._first_word_differs = _prepends_to_first_word(self._tokenizer)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`; special tokens in it count as such, others are added only when asked for."""
        return _encoded(self._tokenizer, text, add_special)

    def more_than(self, text: str, limit: int) -> int:
        """A lower bound of the length of `text` in tokens if that shows it to be over the limit, else 0.

        Counts stretch by stretch and stops early: encoding a whole text of many times the limit would take half a
        kilobyte of memory for each of its tokens, only to be refused.
        """
        if len(text) > limit * self.longest:
            return -(-len(text) // self.longest)
        count = 0
        if len(text) > limit * USUAL_LONGEST:
            for start in range(0, len(text), STRETCH):
                count += len(self.encode(text[start : start + STRETCH])) - STRETCH_ERROR
                if count > limit:
                    return count
        return 0

    def last_added(self, text: str) -> int:
        """Where the last added token in `text` begins; 0: there is none."""
        last = 0
        for found in self._pattern.finditer(text):
            last = found.start()
        return last

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_guarded(self, text: str, guarded: Sequence[Span]) -> list[int]:
        """As encode(), but the guarded stretches (in order) are ordinary text.

        The text is cut at its own added tokens; what lies between two of them and holds a guarded stretch is encoded
        without added tokens, as one, so that guarded text joins its neighbours as any other text would.
        """
        ids: list[int] = []
        plain_from = cursor = next_span = 0
        eats = False
        for token in [*self._pattern.finditer(_masked(text, guarded)), None]:
            end = token.start() if token else len(text)
            if next_span < len(guarded) and guarded[next_span][0] < end:
                ids += self._plain(text[plain_from:cursor])
                ids += self._ordinary(self._trimmed(text[cursor:end], eats, token[0] if token else ""), cursor == 0)
                plain_from = end
                while next_span < len(guarded) and guarded[next_span][0] < end:
                    next_span += 1
            if token:
                cursor = token.end()
                eats = token[0] in self._eats_right
        return ids + self._plain(text[plain_from:])

    def _plain(self, text: str) -> list[int]:
        return self.encode(text) if text else []

    def _trimmed(self, text: str, eaten_left: bool, next_token: str) -> str:
        text = text.lstrip() if eaten_left else text
        return text.rstrip() if next_token in self._eats_left else text

    def _ordinary(self, text: str, at_start: bool) -> list[int]:
        bare = self._without_added_tokens()
        if at_start or not self._first_word_differs:
            return _encoded(bare, text)
        # Alone, this stretch would begin with the space that such tokenizers put before a text's first word.
        newline = _encoded(bare, "\n")
        ids = _encoded(bare, "\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else _encoded(bare, text)

    def _without_added_tokens(self) -> Tokenizer:
        # As large as the tokenizer itself, and most processes never meet special-token text: made when first needed.
        with self._lock:
            if self._bare is None:
                parts = json.loads(self._file.read_bytes())
                parts["added_tokens"] = []
                parts["post_processor"] = parts["truncation"] = parts["padding"] = None
                self._bare = Tokenizer.from_str(json.dumps(parts))
            return self._bare


def _encoded(tokenizer: Tokenizer, text: str, add_special: bool = False) -> list[int]:
    # The batch call lets go of the interpreter while it works, the single one does not.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids


def _masked(text: str, spans: Sequence[Span]) -> str:
    # NUL stands in no token's text, so nothing is found where it stands.
    parts, cursor = [], 0
    for start, stop in spans:
        parts += [text[cursor:start], "\0" * (stop - start)]
        cursor = stop
    return "".join([*parts, text[cursor:]])


def _prepends_to_first_word(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    # Only this part of the file: parsing all of it would cost tens of megabytes.
    steps = json.loads(tokenizer.pre_tokenizer.__getstate__())
    return any(step.get("prepend_scheme") == "first" for step in [steps, *steps.get("pretokenizers", [])])
