"""POST /v1/completions: the chat's machinery on raw text.

Knows Falcon; what the steps do lies in normalize_completion, generate, text_chunks and stream. Invariant: as the
chat's.
"""

import secrets

import falcon.asgi

from api.generate import Generation
from api.normalize_completion import normalize_completion
from api.request_line import RequestLine
from api.resources.replies import answer_stream, answer_whole, list_ignored, now, read_body
from api.settings import ApiSettings
from api.text_chunks import TextFormat


class Completions:
    """The completions route."""

    def __init__(self, generation: Generation, settings: ApiSettings) -> None:
        self._generation = generation
        self._settings = settings

    async def on_post(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        settings = self._settings
        line: RequestLine = req.scope["millpond"]
        asked = await read_body(
            req, self._generation, lambda body: normalize_completion(body, settings.max_tokens, settings.strict_fields)
        )
        model = self._generation.model(asked.model)
        exchange, texts = await self._generation.begin_text(asked, model, line)
        list_ignored(resp, (*asked.ignored, *exchange.ignored))
        await exchange.accepted()
        line.queue_ms = exchange.queue_ms
        echoed = [text for text in texts or [""] * len(asked.prompts) for _ in range(asked.n)]
        form = TextFormat(
            f"cmpl-{secrets.token_hex(12)}", now(), model.name, f"fp_{exchange.fingerprint}", echoed, asked.n
        )
        if asked.stream:
            answer_stream(req, resp, form, exchange, settings)
            return
        await exchange.finished()
        tickets = exchange.tickets
        reasons = [ticket.outcome.value if ticket.outcome else "" for ticket in tickets]
        body = form.whole([ticket.take() for ticket in tickets], reasons, [ticket.summary for ticket in tickets])
        answer_whole(resp, body, exchange, line)
