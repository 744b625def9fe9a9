"""A reply's bytes: the whole object, and the chunks of a stream (pure).

One ChatFormat per client request holds what all its bytes share (id, created, model, fingerprint), encoded once, so
that a content chunk costs one encoding of its text. Knows the contract's §7 and nothing of tickets. Invariant: the
texts of a stream's chunks, joined, are the whole reply's texts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from api.sse import DONE, guarded, json_text
from common.generation import CONTENT, REASONING, TOOL_CALL, Piece, Summary, TokenLogprob

_encode = msgspec.json.Encoder().encode
_ENDING = b'},"finish_reason":null,"logprobs":null}]'


@dataclass
class Choice:
    """One choice of a whole reply, gathered from its pieces."""

    index: int
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list["Call"] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, pieces: Iterable[Piece], new_call_id: "NewCallId") -> None:
        """Take the next pieces."""
        for piece in pieces:
            self.logprobs += piece.logprobs
            if piece.channel == CONTENT:
                self.content.append(piece.text)
            elif piece.channel == REASONING:
                self.reasoning.append(piece.text)
            else:
                if piece.call >= len(self.calls):
                    self.calls.append(Call(new_call_id(self.index, piece.call), piece.name))
                self.calls[piece.call].arguments.append(piece.text)


@dataclass
class Call:
    """One tool call of a choice."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class NewCallId:
    """Ids of tool calls, made from the reply's random id so that none repeats; stable within one reply."""

    def __init__(self, reply_id: str) -> None:
        self._stem = reply_id.removeprefix("chatcmpl-")[:20]

    def __call__(self, choice: int, call: int) -> str:
        return f"call_{self._stem}{choice:02x}{call:02x}"


def usage_object(summaries: Iterable[Summary], per_prompt: int = 0) -> dict[str, Any]:
    """OpenAI's usage for all choices together; a prompt, which per_prompt choices share (0: all), counts once."""
    gathered = list(summaries)
    firsts = gathered[:: per_prompt or max(1, len(gathered))]
    prompt = sum(summary.prompt_tokens for summary in firsts)
    completion = sum(summary.completion_tokens for summary in gathered)
    accepted = sum(summary.accepted_draft_tokens for summary in gathered)
    rejected = sum(summary.rejected_draft_tokens for summary in gathered)
    details = {"reasoning_tokens": sum(summary.reasoning_tokens for summary in gathered)}
    if accepted or rejected:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(summary.cached_tokens for summary in firsts)},
        "completion_tokens_details": details,
    }


def logprobs_object(logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
    """OpenAI's logprobs of one choice or chunk."""
    if not logprobs:
        return None
    return {
        "content": [
            {
                "token": chosen.token,
                "logprob": chosen.logprob,
                "bytes": chosen.bytes,
                "top_logprobs": [
                    {"token": rival.token, "logprob": rival.logprob, "bytes": rival.bytes} for rival in chosen.top
                ],
            }
            for chosen in logprobs
        ],
        "refusal": None,
    }


class ChatFormat:
    """The bytes of one chat reply."""

    def __init__(self, reply_id: str, created: int, model: str, fingerprint: str) -> None:
        self._id, self._created, self._model, self._fingerprint = reply_id, created, model, fingerprint
        self.call_ids = NewCallId(reply_id)
        head = f'"id":{_text(reply_id)},"object":"chat.completion.chunk","created":{created},"model":{_text(model)},'
        self._head = b"data: {" + head.encode() + b'"choices":['
        self._tail = b',"system_fingerprint":' + json_text(fingerprint) + b"}\n\n"
        self._end = _ENDING + self._tail
        self._content: dict[int, bytes] = {}
        # Log-probabilities whose text has left before them, by choice: an empty content delta would be no event, so they
        # go with the next one that is.
        self._late: dict[int, list[TokenLogprob]] = {}
        self._named: set[tuple[int, int]] = set()

    def opening(self, choice: int) -> bytes:
        """The role chunk, which opens a choice."""
        return self._chunk(choice, b'"role":"assistant","content":""')

    def pieces(self, choice: int, pieces: Iterable[Piece]) -> bytes:
        """The chunks of these pieces, in order."""
        return b"".join([self._piece(choice, piece) for piece in pieces])

    def finish(self, choice: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        shown = _logprobs_text(self._late.pop(choice, []))
        ending = b'{"index":%d,"delta":{},"finish_reason":%b,"logprobs":%b}]' % (choice, json_text(reason), shown)
        return self._head + ending + self._tail

    def usage(self, summaries: Iterable[Summary]) -> bytes:
        """The chunk with the whole request's usage, and the end of the stream."""
        return self._head + b'],"usage":' + _encode(usage_object(summaries)) + self._tail + DONE

    def whole(self, choices: Iterable[Choice], summaries: Iterable[Summary]) -> bytes:
        """The reply as one object."""
        return _encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message(choice),
                        "finish_reason": choice.finish_reason,
                        "logprobs": logprobs_object(choice.logprobs),
                    }
                    for choice in choices
                ],
                "usage": usage_object(summaries),
                "system_fingerprint": self._fingerprint,
            }
        )

    def _piece(self, choice: int, piece: Piece) -> bytes:
        if piece.channel == CONTENT and not piece.logprobs and not self._late:
            if not piece.text:
                return b""
            start = self._content.get(choice)
            if start is None:
                start = self._content[choice] = self._head + b'{"index":%d,"delta":{"content":' % choice
            return start + json_text(piece.text) + self._end
        return self._uncommon_piece(choice, piece)

    def _uncommon_piece(self, choice: int, piece: Piece) -> bytes:
        if piece.channel == TOOL_CALL:
            return self._tool_call(choice, piece)
        name = b'"content":' if piece.channel == CONTENT else b'"reasoning_content":'
        logprobs = [*self._late.pop(choice, ()), *piece.logprobs] if piece.channel == CONTENT else piece.logprobs
        if piece.text:
            return self._chunk(choice, name + json_text(piece.text), logprobs)
        if logprobs:
            self._late[choice] = logprobs
        return b""

    def _tool_call(self, choice: int, piece: Piece) -> bytes:
        call: dict[str, Any] = {"index": piece.call}
        if (choice, piece.call) not in self._named:
            self._named.add((choice, piece.call))
            call |= {"id": self.call_ids(choice, piece.call), "type": "function"}
            call["function"] = {"name": piece.name, "arguments": piece.text}
        else:
            call["function"] = {"arguments": piece.text}
        return self._chunk(choice, b'"tool_calls":[' + guarded(_encode(call)) + b"]", piece.logprobs)

    def _chunk(self, choice: int, delta: bytes, logprobs: list[TokenLogprob] | None = None) -> bytes:
        ending = b'},"finish_reason":null,"logprobs":%b}]' % _logprobs_text(logprobs or [])
        return self._head + b'{"index":%d,"delta":{' % choice + delta + ending + self._tail


def _message(choice: Choice) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not choice.calls else None}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for call in choice.calls
        ]
    return message


def _logprobs_text(logprobs: list[TokenLogprob]) -> bytes:
    return guarded(_encode(logprobs_object(logprobs))) if logprobs else b"null"


def _text(text: str) -> str:
    return json_text(text).decode()
