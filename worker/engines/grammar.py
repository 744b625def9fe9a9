"""Structured output: which tokens a row may draw next, by llguidance.

Owns the compiled grammars, each row's place in its grammar and the one mask of a step for all rows. Must never know
requests, text or how a token is drawn. Invariant: a row without a grammar keeps its logits bit by bit, and nothing here
raises into a step: a matcher in a bad state says so in `error`, and the engine ends its row.

A grammar text is a JSON schema, or LARK ("lark:") followed by a grammar in llguidance's Lark dialect with a rule named
`start`, which is what worker/reply_grammar writes for forced calls and for reasoning before an answer.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from common.json_schema import LARK, compiled

# Compiled ones of past requests. One holds the lexer's automaton, mostly well below a megabyte.
KEPT = 64


class BadGrammar(Exception):
    """The text is no grammar, or none that can be enforced; the message is for the client."""


class RowGrammar:
    """One row's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.error = ""
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return not self.error and bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """The row's next token. After the last one nothing more is taken: the row is about to end."""
        if not self.error and not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self._fail()

    def fill(self, bits: np.ndarray, row: int) -> None:
        """Write which tokens may come next."""
        try:
            if not self.error:
                fill_next_token_bitmask(self._matcher, bits, row)
                if self._matcher.is_error():
                    self._fail()
        except Exception:  # misuse raises; whatever it is, only this row may end of it
            self._fail()

    def _fail(self) -> None:
        self.error = "GrammarError"


def _added(tokenizer_json: str) -> list[tuple[str, int]]:
    return [(token["content"], token["id"]) for token in json.loads(tokenizer_json).get("added_tokens", ())]


class Grammars:
    """The grammars of one model. special: tokens that are no letters to a grammar, by their text."""

    def __init__(self, tokenizer_json: str, vocabulary: int, stop_ids: Sequence[int]) -> None:
        """vocabulary: the model's own, which may be larger than the tokenizer's. Takes half a second."""
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=list(stop_ids))
        # Which added tokens llguidance takes for special: those that say so, and all that look like <this>.
        self.special = {
            text: token for text, token in _added(tokenizer_json) if self._tokenizer.is_special_token(token)
        }
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def row(self, text: str) -> RowGrammar:
        """The start of the grammar. Raises BadGrammar."""
        matcher = self._kept.pop(text, None) or self._compile(text)
        self._kept[text] = matcher
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return RowGrammar(matcher.deep_copy())

    def _compile(self, text: str) -> LLMatcher:
        try:
            lark = text.startswith(LARK)
            grammar = LLMatcher.grammar_from_lark(text[len(LARK) :]) if lark else compiled(text)
        except (ValueError, RecursionError) as error:
            raise BadGrammar(f"not a JSON schema: {error}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise BadGrammar(" ".join(matcher.get_error().split())[:300])
        return matcher


def masked(logits: mx.array, grammars: Sequence[RowGrammar | None]) -> mx.array:
    """logits (B, V) with what a row's grammar does not allow at minus infinity; one operation for all rows."""
    rows, width = logits.shape
    # All ones: what is not filled stays allowed.
    bits = allocate_token_bitmask(rows, width)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            grammar.fill(bits, row)
    allowed = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little", count=width).view(np.bool_)
    return mx.where(mx.array(allowed), logits, mx.array(-np.inf, logits.dtype))
