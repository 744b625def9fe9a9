"""POST /v1/chat/completions.

Puts the steps of a chat in the contract's order and answers whole or as a stream. Knows Falcon; what the steps do lies in
normalize, generate, chunks and stream. Invariant: no byte is sent before a worker has accepted every choice.
"""

import secrets
import time
from urllib.parse import quote

import falcon.asgi

from api.chunks import ChatFormat, Choice
from api.exchange import Exchange
from api.extract_json import extract_json
from api.generate import Generation
from api.normalize import NormalizedChat, normalize_chat
from api.read_json import BadBody, read_object
from api.request_line import RequestLine
from api.responses import RequestError
from api.settings import ApiSettings
from api.stream import ChatStream

# Reading JSON takes up to a millisecond per 100 KB, looking for it in text ten times that: more is done beside the loop.
READ_IN_THREAD_BYTES = 32768
# Header values have to stay far below the 8 KB that servers and proxies take.
IGNORED_BYTES = 1024


class Chat:
    """The chat route."""

    def __init__(self, generation: Generation, settings: ApiSettings) -> None:
        self._generation = generation
        self._settings = settings

    async def on_post(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        line: RequestLine = req.scope["millpond"]
        chat = await self._normalized(await req.stream.read())
        model = self._generation.model(chat.model)
        exchange, enforced = await self._generation.begin(chat, model, line)
        if chat.ignored:
            resp.set_header("x-millpond-ignored", ignored_header(chat.ignored))
        await exchange.accepted()
        line.queue_ms = exchange.queue_ms
        form = ChatFormat(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model.name, f"fp_{model.fingerprint}")
        if chat.stream:
            self._stream(resp, exchange, form, line)
        else:
            await self._whole(resp, chat, exchange, form, line, enforced)

    async def _normalized(self, body: bytes) -> NormalizedChat:
        if len(body) > READ_IN_THREAD_BYTES:
            return await self._generation.in_thread(self._normalize, body)
        return self._normalize(body)

    def _normalize(self, body: bytes) -> NormalizedChat:
        try:
            read = read_object(body)
        except BadBody as error:
            raise RequestError(400, str(error)) from None
        return normalize_chat(read, self._settings.max_tokens, self._settings.strict_fields)

    def _stream(self, resp: falcon.asgi.Response, exchange: Exchange, form: ChatFormat, line: RequestLine) -> None:
        self._name_worker(resp, exchange, line)
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("cache-control", "no-cache")
        resp.set_header("x-accel-buffering", "no")
        resp.stream = ChatStream(
            exchange,
            form,
            line,
            buffer=self._settings.stream_buffer,
            comment_s=self._settings.keep_alive_comment,
        )

    async def _whole(
        self,
        resp: falcon.asgi.Response,
        chat: NormalizedChat,
        exchange: Exchange,
        form: ChatFormat,
        line: RequestLine,
        enforced: bool,
    ) -> None:
        await exchange.finished()
        choices = [Choice(index) for index in range(chat.n)]
        for choice, ticket in zip(choices, exchange.tickets, strict=True):
            choice.add(ticket.take(), form.call_ids)
            choice.finish_reason = ticket.outcome.value if ticket.outcome else ""
            if chat.response_format.json_mode and not enforced:
                choice.content = [await self._reduced("".join(choice.content))]
        summaries = [ticket.summary for ticket in exchange.tickets]
        resp.data = form.whole(choices, summaries)
        resp.content_type = "application/json"
        self._name_worker(resp, exchange, line)
        line.outcome = choices[0].finish_reason
        line.completion_tokens = sum(summary.completion_tokens for summary in summaries)
        line.ttft_ms = line.queue_ms + summaries[0].first_token_ms
        times = {
            "queue": line.queue_ms,
            "prefill": summaries[0].prefill_ms,
            "decode": max(summary.decode_ms for summary in summaries),
            "total": line.elapsed_ms(),
        }
        resp.set_header("server-timing", ", ".join(f"{name};dur={value:.1f}" for name, value in times.items()))

    async def _reduced(self, text: str) -> str:
        if len(text) > READ_IN_THREAD_BYTES:
            return await self._generation.in_thread(extract_json, text)
        return extract_json(text)

    @staticmethod
    def _name_worker(resp: falcon.asgi.Response, exchange: Exchange, line: RequestLine) -> None:
        line.worker, line.lane = exchange.tickets[0].worker, exchange.tickets[0].lane
        resp.set_header("x-millpond-worker", header_text(line.worker))
        resp.set_header("x-millpond-lane", header_text(line.lane))


def header_text(text: str) -> str:
    """`text` as a header value: printable ASCII as it is, the rest percent-encoded."""
    return quote(text, safe=" !#$&'()*+,/:;=?@[]-._~|")


def ignored_header(names: tuple[str, ...]) -> str:
    """The names, comma-separated; what would make the header too long is only counted."""
    value = ""
    for count, name in enumerate(names):
        encoded = quote(name, safe="!#$&'*+-.^_`|~")
        if len(value) + len(encoded) > IGNORED_BYTES:
            return f"{value}, and {len(names) - count} more" if value else f"{len(names)} fields"
        value = f"{value}, {encoded}" if value else encoded
    return value
