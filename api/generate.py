"""From a checked request to tickets that a worker has taken: the order of checks after the body's.

Joins models, link and prompt threads for the resources that generate. Knows no HTTP but its errors. Invariant: what it
reserves is in the line's exchange before anything can fail, so that closing the exchange gives it back.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from api.abilities import not_honoured, sampling
from api.broker_link import BrokerLink
from api.exchange import Exchange
from api.fields import refuse
from api.normalize import NormalizedChat
from api.normalize_completion import NormalizedCompletion
from api.prompt import Prompt, TooLong
from api.request_line import RequestLine
from api.responses import RequestError, model_not_found
from api.served import ServedModel, find
from api.template import TemplateComplaint
from common.errors import ServingError
from common.generation import GenerationRequest, Sampling
from common.outcomes import Outcome

T = TypeVar("T")
# How long the last snapshot counts for what workers can do, which changes only when a model is swapped.
ABILITIES_S = 1.0
ANY_OBJECT = '{"type":"object"}'


class Generation:
    """What resources use to generate."""

    def __init__(
        self, models: dict[str, ServedModel], link: BrokerLink, threads: ThreadPoolExecutor, max_prompt: int,
        strict: bool = False,
    ) -> None:  # fmt: skip
        """strict: a field that cannot be honoured is refused."""
        self.models = models
        self.link = link
        self._threads = threads
        self._max_prompt = max_prompt
        self._strict = strict
        self._abilities: dict[str, frozenset[str]] = {}
        self._abilities_until = 0.0

    def model(self, name: str) -> ServedModel:
        """The served model of this id or alias. Raises RequestError (404)."""
        model = find(self.models, name)
        if model is None:
            raise model_not_found(name, sorted(self.models))
        return model

    def model_or_only(self, name: str | None) -> ServedModel:
        """The served model; without a name the first one, which is mostly the only one. Raises RequestError."""
        return next(iter(self.models.values())) if name is None and self.models else self.model(name or "")

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run what would hold up the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def begin_chat(self, chat: NormalizedChat, model: ServedModel, line: RequestLine) -> tuple[Exchange, bool]:
        """Reserve, render, submit. The exchange, and whether a grammar will hold the reply to JSON.

        Raises RequestError, ServingError.
        """
        _check_against_model(chat, model)
        exchange = await self._reserve(chat.n, chat.priority, chat.stream, model, line)
        drawn = await self._sampling(chat.sampling, model, exchange)
        grammar = await self._grammar(chat, model)
        prompt = await self._prompt(chat, model)
        line.mark("rendered")
        line.prompt_tokens = len(prompt.ids)
        exchange.submit(_chat_requests(chat, model, prompt, drawn, grammar), model.fingerprint)
        return exchange, bool(grammar)

    async def begin_text(
        self, asked: NormalizedCompletion, model: ServedModel, line: RequestLine
    ) -> tuple[Exchange, list[str]]:
        """Reserve, tokenize, submit; choices of one prompt stand together. The exchange, and the prompts' texts to
        echo.

        Raises RequestError, ServingError.
        """
        check_bias(asked.sampling, model)
        check_ids([prompt for prompt in asked.prompts if isinstance(prompt, list)], model)
        exchange = await self._reserve(len(asked.prompts) * asked.n, asked.priority, asked.stream, model, line)
        drawn = await self._sampling(asked.sampling, model, exchange)
        limit = model.prompt_limit(self._max_prompt)
        try:
            prompts = await self.in_thread(lambda: [model.prompts.text(prompt, limit) for prompt in asked.prompts])
        except TooLong as error:
            raise _too_long(error, limit, "prompt") from None
        line.mark("rendered")
        line.prompt_tokens = sum(map(len, prompts))
        exchange.submit(_text_requests(asked, model, prompts, drawn), model.fingerprint)
        texts = [
            prompt if isinstance(prompt, str) else model.prompts.tokens.decode(prompt)
            for prompt in (asked.prompts if asked.echo else ())
        ]
        return exchange, texts

    async def _reserve(
        self, count: int, priority: int, stream: bool, model: ServedModel, line: RequestLine
    ) -> Exchange:
        if priority > line.key.max_priority:
            raise refuse("priority", f"priority may be at most {line.key.max_priority} with this key")
        line.model, line.stream = model.name, stream
        line.exchange = exchange = Exchange(self.link, count)
        line.mark("parsed")
        fingerprint = await exchange.reserve(line.label, model.name, priority, line.key.name)
        line.mark("place held")
        if fingerprint not in ("", model.fingerprint):
            raise ServingError(Outcome.STALE_MODEL)
        for ticket in exchange.tickets:
            ticket.quiet = not stream
        return exchange

    async def _sampling(self, given: dict[str, Any], model: ServedModel, exchange: Exchange) -> Sampling:
        """How the request is drawn; what the model cannot honour of it is noted. Raises RequestError when strict."""
        if not given and model.defaults == Sampling():
            return model.defaults
        abilities = await self._abilities_of(model)
        exchange.ignored += not_honoured(given, abilities, self._strict)
        return sampling(given, model.defaults, abilities)

    async def _prompt(self, chat: NormalizedChat, model: ServedModel) -> Prompt:
        limit = model.prompt_limit(self._max_prompt)
        try:
            return await self.in_thread(
                model.prompts.chat, chat.messages, chat.template_kwargs, chat.tools.offered, limit
            )
        except TooLong as error:
            raise _too_long(error, limit, "messages") from None
        except TemplateComplaint as error:
            raise refuse("messages", str(error)) from None

    async def _grammar(self, chat: NormalizedChat, model: ServedModel) -> str:
        wanted = chat.response_format
        if not wanted.json_mode:
            return ""
        if "grammar" not in await self._abilities_of(model):
            if wanted.strict:
                raise refuse("response_format", "response_format: strict schemas cannot be enforced by this model")
            return ""
        if wanted.kind == "json_schema" and wanted.schema:
            return json.dumps(wanted.schema, ensure_ascii=False)
        return ANY_OBJECT

    async def _abilities_of(self, model: ServedModel) -> frozenset[str]:
        if time.monotonic() >= self._abilities_until:
            snapshot = await self.link.snapshot()
            # A model none of whose workers is there keeps those that it had: they will come back.
            self._abilities |= {
                entry["name"]: frozenset(entry["abilities"]) for entry in snapshot.get("models", ()) if entry["lanes"]
            }
            self._abilities_until = time.monotonic() + ABILITIES_S
        return self._abilities.get(model.name, model.assumed)


def check_bias(sampling: dict[str, Any], model: ServedModel) -> None:
    """Raises RequestError for a logit_bias of no token of the model's."""
    size = model.prompts.tokens.size
    for token in sampling.get("logit_bias", ()):
        if token >= size:
            raise refuse("logit_bias", f"logit_bias: {token} is not a token id of {model.name}, which has {size}")


def check_ids(prompts: Sequence[Sequence[int]], model: ServedModel, param: str = "prompt") -> None:
    """Raises RequestError for ids of no token of the model's."""
    size = model.prompts.tokens.size
    for prompt in prompts:
        if max(prompt, default=0) >= size:
            raise refuse(param, f"{param}: {max(prompt)} is not a token id of {model.name}, which has {size}")


def _check_against_model(chat: NormalizedChat, model: ServedModel) -> None:
    if chat.tools.offered and not model.prompts.knows_tools:
        raise refuse("tools", f"tools are not supported by {model.name}: its chat template knows none")
    check_bias(chat.sampling, model)


def _too_long(error: TooLong, limit: int, param: str) -> RequestError:
    message = f"This model's prompt limit is {limit} tokens: {error}."
    return RequestError(400, message, code="context_length_exceeded", param=param)


def _chat_requests(
    chat: NormalizedChat, model: ServedModel, prompt: Prompt, drawn: Sampling, grammar: str
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=prompt.ids,
            max_tokens=min(chat.max_tokens, model.context - len(prompt.ids)),
            sampling=drawn,
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


def _text_requests(
    asked: NormalizedCompletion, model: ServedModel, prompts: Sequence[list[int]], drawn: Sampling
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=min(asked.max_tokens, model.context - len(prompt)),
            sampling=drawn,
            stop=asked.stop,
            top_logprobs=asked.logprobs,
            choice=choice,
            raw=True,
        )
        for prompt in prompts
        for choice in range(asked.n)
    ]
