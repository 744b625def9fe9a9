"""Replies drawn at random from all that a grammar allows."""

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer

from common.json_schema import LARK

# Tokens of one reply; the closers end strings and texts long before.
BUDGET = 4000


class Walker:
    """One grammar on one tokenizer, whose end of sequence is <|im_end|>."""

    def __init__(self, tokens: Tokenizer, grammar: str, closers: list[str]) -> None:
        """closers: texts that are tried first now and then, since by chance alone a text would hardly ever end."""
        assert grammar.startswith(LARK)
        self._tokens = tokens
        self._end = tokens.token_to_id("<|im_end|>")
        self._lark = LLMatcher.grammar_from_lark(grammar[len(LARK) :])
        self._width = tokens.get_vocab_size()
        self._for_grammar = LLTokenizer(tokens.to_str(), n_vocab=self._width, eos_token=self._end)
        self._closers = [self._ids(text) for text in closers if text]

    def text(self, draw: random.Random) -> str:
        """A whole reply."""
        matcher, ids = self._matcher(), []
        for _ in range(BUDGET):
            if matcher.is_stopped():
                return self._tokens.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")
            taken = self._closer(matcher, draw) if draw.random() < 0.4 else []
            taken = taken or [draw.choice(self._allowed(matcher))]
            assert matcher.consume_tokens(taken), matcher.get_error()
            ids += taken
        raise AssertionError("the reply does not end")

    def allows(self, text: str) -> bool:
        """Whether a reply may begin so."""
        ids = self._ids(text)
        return self._matcher().validate_tokens(ids) == len(ids)

    def may_end(self, text: str) -> bool:
        """Whether a reply may be this."""
        matcher = self._matcher()
        return matcher.consume_tokens(self._ids(text)) and matcher.is_accepting()

    def _matcher(self) -> LLMatcher:
        matcher = LLMatcher(self._for_grammar, self._lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _closer(self, matcher: LLMatcher, draw: random.Random) -> list[int]:
        fitting = [ids for ids in self._closers if matcher.validate_tokens(ids) == len(ids)]
        return draw.choice(fitting) if fitting else []

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        bits = allocate_token_bitmask(1, self._width)
        fill_next_token_bitmask(matcher, bits, 0)
        row = np.unpackbits(bits[0].view(np.uint8), bitorder="little", count=self._width)
        return [int(token) for token in np.flatnonzero(row)]

    def _ids(self, text: str) -> list[int]:
        return self._tokens.encode(text, add_special_tokens=False).ids
