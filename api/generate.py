"""From a checked chat to tickets that a worker has taken: the order of checks after the body's.

Joins models, link and prompt threads for the resources that generate. Knows no HTTP but its errors. Invariant: what it
reserves is in the line's exchange before anything can fail, so that closing the exchange gives it back.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from api.broker_link import BrokerLink
from api.exchange import Exchange
from api.fields import refuse
from api.normalize import NormalizedChat
from api.prompt import Prompt, TooLong
from api.request_line import RequestLine
from api.responses import RequestError, model_not_found
from api.served import ServedModel
from api.template import TemplateComplaint
from common.errors import ServingError
from common.generation import GenerationRequest
from common.outcomes import Outcome

T = TypeVar("T")
# How long the last snapshot counts for what workers can do, which changes only when a model is swapped.
ABILITIES_S = 1.0
ANY_OBJECT = '{"type":"object"}'


class Generation:
    """What resources use to generate."""

    def __init__(
        self, models: dict[str, ServedModel], link: BrokerLink, threads: ThreadPoolExecutor, max_prompt: int
    ) -> None:
        self.models = models
        self.link = link
        self._threads = threads
        self._max_prompt = max_prompt
        self._abilities: dict[str, frozenset[str]] = {}
        self._abilities_until = 0.0

    def model(self, name: str) -> ServedModel:
        """The served model. Raises RequestError (404)."""
        model = self.models.get(name)
        if model is None:
            raise model_not_found(name, sorted(self.models))
        return model

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run what would hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def begin(self, chat: NormalizedChat, model: ServedModel, line: RequestLine) -> tuple[Exchange, bool]:
        """Reserve, render, submit. The exchange, and whether a grammar will hold the reply to JSON.

        Raises RequestError, ServingError.
        """
        _check_against_model(chat, model)
        line.model, line.stream = model.name, chat.stream
        line.exchange = exchange = Exchange(self.link, chat.n)
        fingerprint = await exchange.reserve(line.label, model.name, chat.priority, line.key)
        if fingerprint not in ("", model.fingerprint):
            raise ServingError(Outcome.STALE_MODEL)
        grammar = await self._grammar(chat, model)
        prompt = await self._prompt(chat, model)
        line.prompt_tokens = len(prompt.ids)
        requests = _requests(chat, model, prompt, grammar)
        for ticket in exchange.tickets:
            ticket.quiet = not chat.stream
        exchange.submit(requests, model.fingerprint)
        return exchange, bool(grammar)

    async def _prompt(self, chat: NormalizedChat, model: ServedModel) -> Prompt:
        try:
            return await self.in_thread(
                model.prompts.chat,
                chat.messages,
                chat.template_kwargs,
                chat.tools.offered,
                model.prompt_limit(self._max_prompt),
            )
        except TooLong as error:
            message = f"This model's prompt limit is {model.prompt_limit(self._max_prompt)} tokens: {error}."
            raise RequestError(400, message, code="context_length_exceeded", param="messages") from None
        except TemplateComplaint as error:
            raise refuse("messages", str(error)) from None

    async def _grammar(self, chat: NormalizedChat, model: ServedModel) -> str:
        wanted = chat.response_format
        if not wanted.json_mode:
            return ""
        if "grammar" not in await self._abilities_of(model.name):
            if wanted.strict:
                raise refuse("response_format", "response_format: strict schemas cannot be enforced by this model")
            return ""
        if wanted.kind == "json_schema" and wanted.schema:
            return json.dumps(wanted.schema, ensure_ascii=False)
        return ANY_OBJECT

    async def _abilities_of(self, name: str) -> frozenset[str]:
        if time.monotonic() >= self._abilities_until:
            snapshot = await self.link.snapshot()
            self._abilities = {entry["name"]: frozenset(entry["abilities"]) for entry in snapshot.get("models", ())}
            self._abilities_until = time.monotonic() + ABILITIES_S
        return self._abilities.get(name, frozenset())


def _check_against_model(chat: NormalizedChat, model: ServedModel) -> None:
    if chat.tools.offered and not model.prompts.knows_tools:
        raise refuse("tools", f"tools are not supported by {model.name}: its chat template knows none")
    size = model.prompts.tokens.size
    for token in chat.sampling.get("logit_bias", ()):
        if token >= size:
            raise refuse("logit_bias", f"logit_bias: {token} is not a token id of {model.name}, which has {size}")


def _requests(chat: NormalizedChat, model: ServedModel, prompt: Prompt, grammar: str) -> list[GenerationRequest]:
    max_tokens = min(chat.max_tokens, model.context - len(prompt.ids))
    return [
        GenerationRequest(
            prompt=prompt.ids,
            max_tokens=max_tokens,
            sampling=model.sampling(chat.sampling),
            stop=chat.stop,
            top_logprobs=chat.top_logprobs,
            thinking=bool(chat.template_kwargs["enable_thinking"]),
            reasoning_open=prompt.reasoning_open,
            grammar=grammar,
            tools=chat.tools.packed(),
            choice=choice,
        )
        for choice in range(chat.n)
    ]
