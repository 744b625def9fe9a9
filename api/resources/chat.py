"""POST /v1/chat/completions.

Puts the steps of a chat in the contract's order and answers whole or as a stream. Knows Falcon; what the steps do
lies in normalize, generate, chunks and stream. Invariant: no byte is sent before a worker has accepted every choice.
"""

import secrets

import falcon.asgi

from api.chunks import ChatFormat, Choice
from api.exchange import Exchange
from api.extract_json import extract_json
from api.generate import Generation
from api.normalize import NormalizedChat, normalize_chat
from api.request_line import RequestLine
from api.resources.replies import (
    BESIDE_THE_LOOP_BYTES,
    answer_stream,
    answer_whole,
    list_ignored,
    now,
    read_body,
)
from api.settings import ApiSettings


class Chat:
    """The chat route."""

    def __init__(self, generation: Generation, settings: ApiSettings) -> None:
        self._generation = generation
        self._settings = settings

    async def on_post(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        settings = self._settings
        line: RequestLine = req.scope["millpond"]
        chat = await read_body(
            req, self._generation, lambda body: normalize_chat(body, settings.max_tokens, settings.strict_fields)
        )
        model = self._generation.model(chat.model)
        exchange = await self._generation.begin_chat(chat, model, line)
        list_ignored(resp, (*chat.ignored, *exchange.ignored))
        await exchange.accepted()
        line.queue_ms = exchange.queue_ms
        form = ChatFormat(f"chatcmpl-{secrets.token_hex(12)}", now(), model.name, f"fp_{exchange.fingerprint}")
        if chat.stream:
            answer_stream(req, resp, form, exchange, settings)
        else:
            body = await self._whole(chat, exchange, form)
            answer_whole(resp, body, exchange, line)

    async def _whole(self, chat: NormalizedChat, exchange: Exchange, form: ChatFormat) -> bytes:
        await exchange.finished()
        choices = [Choice(index) for index in range(chat.n)]
        for choice, ticket in zip(choices, exchange.tickets, strict=True):
            choice.add(ticket.take(), form.call_ids)
            choice.finish_reason = ticket.outcome.value if ticket.outcome else ""
            if chat.response_format.json_mode and not exchange.enforced:
                choice.content = [await self._reduced("".join(choice.content))]
        return form.whole(choices, [ticket.summary for ticket in exchange.tickets])

    async def _reduced(self, text: str) -> str:
        if len(text) > BESIDE_THE_LOOP_BYTES:
            return await self._generation.in_thread(extract_json, text)
        return extract_json(text)
