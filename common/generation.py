"""The payloads that API and worker share; the broker never opens them and may not import this module (pure).

GenerationRequest travels in SUBMIT and DISPATCH, list[Piece] in TOKENS, Summary in DONE. Bytes are plain msgpack arrays in
field order. unpack_*() raise ProtocolError for anything else.
"""

from typing import Annotated, Any, TypeVar

import msgpack
import msgspec

from common.errors import ProtocolError

CONTENT, REASONING, TOOL_CALL = 0, 1, 2


class _Payload(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of payloads: a msgpack array."""


class Sampling(_Payload):
    """How a token is drawn from the model's distribution; the neutral values draw from it unchanged.

    temperature 0 is greedy; top_p 1, top_k 0, min_p 0 and the penalties' neutral values are off. logit_bias: token id ->
    added logit. seed None: not reproducible.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}


class GenerationRequest(_Payload):
    """One generation, normalized: everything a worker needs.

    prompt: token ids. max_tokens: already capped by the API at the room in the context. stop: strings matched in the
    decoded text. top_logprobs: -1 none, 0 the chosen token's only, n the n best too. system_tokens: length of the prompt's
    head that other requests may share. thinking: the template left reasoning on. reasoning_open: the prompt ends inside
    a reasoning block. grammar: "" or a JSON schema or a marker (issue of the engine). tools: JSON text of the tools, "" none.
    choice: index of this choice, mixed into the seed so that choices differ.
    """

    prompt: list[int]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    sampling: Sampling = Sampling()
    stop: list[str] = []
    top_logprobs: int = -1
    system_tokens: int = 0
    thinking: bool = False
    reasoning_open: bool = False
    grammar: str = ""
    tools: str = ""
    choice: int = 0
    stop_in_reasoning: bool = False
    raw: bool = False


class TopLogprob(_Payload):
    """One candidate: its text, natural-log probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(_Payload):
    """The chosen token and its rivals, in OpenAI's sense."""

    token: str
    logprob: float
    bytes: list[int]
    top: list[TopLogprob] = []


class Piece(_Payload):
    """Text of one channel that belongs together, never empty in all of its fields.

    channel: CONTENT, REASONING or TOOL_CALL. For a tool call: call is its index, name is set on its first piece only, text
    is the next stretch of its arguments (JSON).
    """

    channel: int
    text: str
    logprobs: list[TokenLogprob] = []
    call: int = -1
    name: str = ""


class Summary(_Payload):
    """How a reply ended, from the worker: tokens counted, lane that really ran, what it took.

    completion_tokens counts every generated token without the stop token. Durations in milliseconds. error: type name of
    what failed, never its text. marks: (name, instant on the machine's monotonic clock in seconds), for `millpond trace`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    lane: str = ""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    first_token_ms: float = 0.0
    error: str = ""
    marks: list[tuple[str, float]] = []


T = TypeVar("T")


def _pack(payload: object) -> bytes:
    return msgpack.packb(msgspec.to_builtins(payload, builtin_types=(bytes,), str_keys=False))


def _unpack(data: bytes, kind: type[T]) -> T:
    try:
        plain: Any = msgpack.unpackb(data, strict_map_key=False)
        return msgspec.convert(plain, kind)
    except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"payload is not {getattr(kind, '__name__', kind)}: {error}") from None


def pack_request(request: GenerationRequest) -> bytes:
    """Payload of SUBMIT."""
    return _pack(request)


def unpack_request(data: bytes) -> GenerationRequest:
    """Payload of DISPATCH. Raises ProtocolError."""
    return _unpack(data, GenerationRequest)


def pack_pieces(pieces: list[Piece]) -> bytes:
    """Payload of TOKENS. A plain text piece is packed as [channel, text], which is nearly all of the traffic."""
    return msgpack.packb(
        [
            [piece.channel, piece.text] if piece.call < 0 and not piece.logprobs else msgspec.to_builtins(piece)
            for piece in pieces
        ]
    )


# By far the most frequent payload: decoded in one step, three times as fast as _unpack().
_decode_pieces = msgspec.msgpack.Decoder(list[Piece]).decode


def unpack_pieces(data: bytes) -> list[Piece]:
    """Payload of TOKENS. Raises ProtocolError."""
    try:
        return _decode_pieces(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"payload is not a list of pieces: {error}") from None


def pack_summary(summary: Summary) -> bytes:
    """Payload of DONE."""
    return _pack(summary)


def pack_marks(marks: list[tuple[str, float]]) -> bytes:
    """Payload of TRACE_MARKS."""
    return msgpack.packb(marks)


def unpack_marks(data: bytes) -> list[tuple[str, float]]:
    """Payload of TRACE_MARKS. Raises ProtocolError."""
    return _unpack(data, list[tuple[str, float]]) if data else []


def unpack_summary(data: bytes) -> Summary:
    """Payload of DONE; empty bytes (the broker ended the request) are an empty summary. Raises ProtocolError."""
    return _unpack(data, Summary) if data else Summary()
