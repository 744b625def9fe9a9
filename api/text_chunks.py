"""A text completion's bytes: the whole object, and the chunks of a stream (pure).

The counterpart of chunks for /v1/completions: text only, no role, no reasoning, no tools. Invariant: the texts of a
stream's chunks, joined, are the whole reply's texts, echoed prompts included.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.chunks import usage_object
from api.sse import DONE, KEEP_ALIVE, event, guarded
from common.generation import Piece, Summary, TokenLogprob

_encode = msgspec.json.Encoder().encode


class TextLogprobs:
    """The text shape of logprobs, chunk by chunk: offsets go on over the chunks of a choice."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, chosen: Sequence[TokenLogprob]) -> dict[str, Any]:
        """tokens, token_logprobs, top_logprobs and text_offset of the next tokens."""
        offsets = []
        for one in chosen:
            offsets.append(self._offset)
            self._offset += len(one.token)
        return {
            "tokens": [one.token for one in chosen],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [{rival.token: rival.logprob for rival in one.top} for one in chosen],
            "text_offset": offsets,
        }


class TextFormat:
    """The bytes of one completion. echoed: the text that goes before each choice's own, "" for none."""

    def __init__(
        self, reply_id: str, created: int, model: str, fingerprint: str, echoed: Sequence[str], per_prompt: int
    ) -> None:
        self._shared = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        self._fingerprint = fingerprint
        self._echoed = echoed
        self._per_prompt = per_prompt
        self._logprobs = [TextLogprobs() for _ in echoed]
        # Those whose text has left before them, by choice: they go with the next chunk that has some, or the last one.
        self._late: dict[int, list[TokenLogprob]] = {}

    def opening(self, choice: int) -> bytes:
        """What is sent with the 200: the echoed prompt, or a comment, since the server holds back headers alone."""
        echoed = self._echoed[choice]
        if echoed:
            return self._chunk(choice, echoed, None, [])
        return KEEP_ALIVE if choice == 0 else b""

    def pieces(self, choice: int, pieces: Iterable[Piece]) -> bytes:
        """The chunks of these pieces, in order."""
        return b"".join([self._piece(choice, piece) for piece in pieces])

    def finish(self, choice: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        return self._chunk(choice, "", reason, self._late.pop(choice, []))

    def usage(self, summaries: Iterable[Summary]) -> bytes:
        """The chunk with the whole request's usage, and the end of the stream."""
        return self._event({"choices": [], "usage": usage_object(summaries, self._per_prompt)}) + DONE

    def whole(self, choices: Iterable[Sequence[Piece]], reasons: Sequence[str], summaries: Iterable[Summary]) -> bytes:
        """The reply as one object."""
        found = []
        for index, pieces in enumerate(choices):
            text = self._echoed[index] + "".join([piece.text for piece in pieces])
            logprobs = [one for piece in pieces for one in piece.logprobs]
            found.append(self._choice(index, text, reasons[index], logprobs))
        usage = usage_object(summaries, self._per_prompt)
        return _encode({**self._shared, "choices": found, "usage": usage, "system_fingerprint": self._fingerprint})

    def _piece(self, choice: int, piece: Piece) -> bytes:
        logprobs = [*self._late.pop(choice, ()), *piece.logprobs]
        if piece.text:
            return self._chunk(choice, piece.text, None, logprobs)
        if logprobs:
            self._late[choice] = logprobs
        return b""

    def _choice(self, index: int, text: str, reason: str | None, chosen: Sequence[TokenLogprob]) -> dict[str, Any]:
        logprobs = self._logprobs[index].of(chosen) if chosen else None
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, index: int, text: str, reason: str | None, chosen: Sequence[TokenLogprob]) -> bytes:
        return self._event({"choices": [self._choice(index, text, reason, chosen)]})

    def _event(self, rest: dict[str, Any]) -> bytes:
        return event(guarded(_encode({**self._shared, **rest, "system_fingerprint": self._fingerprint})))
