"""From a checked request to tickets that a worker has taken: the order of checks after the body's.

Joins models, link and prompt threads for the resources that generate. Knows no HTTP but its errors. Invariant: what it
reserves is in the line's exchange before anything can fail, so that closing the exchange gives it back.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from api.abilities import not_honoured, sampling
from api.broker_link import BrokerLink
from api.catalog import Catalog
from api.exchange import Exchange
from api.fields import refuse
from api.normalize import NormalizedChat, ResponseFormat
from api.normalize_completion import NormalizedCompletion
from api.prompt import Prompt, TooLong
from api.request_line import RequestLine
from api.responses import RequestError, model_not_found
from api.served import ServedModel, find
from api.template import TemplateComplaint
from api.tools import Tools
from common.generation import GenerationRequest, Sampling
from common.json_schema import check_schema

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
        self.catalog = Catalog(models, link, self.in_thread)
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

    async def begin_chat(
        self, chat: NormalizedChat, model: ServedModel, line: RequestLine
    ) -> tuple[Exchange, bool, list[str]]:
        """Reserve, render, submit. The exchange, whether a grammar will hold the reply to JSON, and what of the schema
        it leaves out.

        Raises RequestError, ServingError.
        """
        _check_against_model(chat, model)
        exchange, fingerprint = await self._reserve(chat.n, chat.priority, chat.stream, model, line)
        drawn = await self._sampling(chat.sampling, model, exchange)
        await self._check_forced(chat.tools, model)
        grammar, left_out = await self._grammar(chat.response_format, model)

        async def render(fingerprint: str) -> tuple[list[GenerationRequest], str]:
            now = await self._model_for(model, fingerprint)
            if now is not model:
                _check_against_model(chat, now)
            prompt = await self._prompt(chat, now)
            line.mark("rendered")
            line.prompt_tokens = len(prompt.ids)
            return _chat_requests(chat, now, prompt, drawn, grammar), now.fingerprint

        exchange.submit(*await render(fingerprint), render)
        return exchange, bool(grammar), left_out

    async def begin_text(
        self, asked: NormalizedCompletion, model: ServedModel, line: RequestLine
    ) -> tuple[Exchange, list[str]]:
        """Reserve, tokenize, submit; choices of one prompt stand together. The exchange, and the prompts' texts to
        echo.

        Raises RequestError, ServingError.
        """
        check_bias(asked.sampling, model)
        check_ids([prompt for prompt in asked.prompts if isinstance(prompt, list)], model)
        count = len(asked.prompts) * asked.n
        exchange, fingerprint = await self._reserve(count, asked.priority, asked.stream, model, line)
        drawn = await self._sampling(asked.sampling, model, exchange)

        async def render(fingerprint: str) -> tuple[list[GenerationRequest], str]:
            now = await self._model_for(model, fingerprint)
            if now is not model:
                check_bias(asked.sampling, now)
                check_ids([prompt for prompt in asked.prompts if isinstance(prompt, list)], now)
            limit = now.prompt_limit(self._max_prompt)
            try:
                prompts = await self.in_thread(lambda: [now.prompts.text(prompt, limit) for prompt in asked.prompts])
            except TooLong as error:
                raise _too_long(error, limit, "prompt") from None
            line.mark("rendered")
            line.prompt_tokens = sum(map(len, prompts))
            return _text_requests(asked, now, prompts, drawn), now.fingerprint

        exchange.submit(*await render(fingerprint), render)
        texts = [
            prompt if isinstance(prompt, str) else model.prompts.tokens.decode(prompt)
            for prompt in (asked.prompts if asked.echo else ())
        ]
        return exchange, texts

    async def _reserve(
        self, count: int, priority: int | None, stream: bool, model: ServedModel, line: RequestLine
    ) -> tuple[Exchange, str]:
        if priority is None:
            priority = min(0, line.key.max_priority)
        if priority > line.key.max_priority:
            raise refuse("priority", f"priority may be at most {line.key.max_priority} with this key")
        line.model, line.stream = model.name, stream
        line.exchange = exchange = Exchange(self.link, count)
        line.mark("parsed")
        fingerprint = await exchange.reserve(line.label, model.name, priority, line.key.name, line.key.weight)
        line.mark("place held")
        for ticket in exchange.tickets:
            ticket.quiet = not stream
        return exchange, fingerprint

    async def _model_for(self, model: ServedModel, fingerprint: str) -> ServedModel:
        if fingerprint in ("", model.fingerprint):
            return model
        return await self.catalog.rendered_for(model.name, fingerprint)

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

    async def _check_forced(self, tools: Tools, model: ServedModel) -> None:
        """A call that is asked for must be one that can be enforced."""
        if not tools.forced:
            return
        if not await self._can("tool_choice", model):
            raise refuse("tool_choice", f"tool_choice: a call cannot be enforced by {model.name}")
        for index, tool in enumerate(tools.definitions):
            parameters = tool["function"].get("parameters")
            usable, why, _ = await self._checked_schema(parameters) if parameters else (True, "", [])
            if not usable:
                raise refuse("tools", f"tools[{index}].function.parameters: {why}")

    async def _grammar(self, wanted: ResponseFormat, model: ServedModel) -> tuple[str, list[str]]:
        """The schema that the reply is held to, "" for none, and what of the client's is not enforced."""
        if not wanted.json_mode:
            return "", []
        schema = wanted.schema if wanted.kind == "json_schema" else None
        usable, why, left_out = await self._checked_schema(schema) if schema else (True, "", [])
        if not usable:
            raise refuse("response_format", f"response_format.json_schema.schema: {why}")
        enforced = await self._can("grammar", model)
        if wanted.strict and not enforced:
            raise refuse("response_format", "response_format: strict schemas cannot be enforced by this model")
        if wanted.strict and left_out:
            raise refuse(
                "response_format",
                f"response_format: strict, but these keywords cannot be enforced: {', '.join(left_out)}",
            )
        if not enforced:
            return "", []
        grammar = json.dumps(schema, ensure_ascii=False) if schema else ANY_OBJECT
        return grammar, [f"response_format.{keyword}" for keyword in left_out]

    async def _checked_schema(self, schema: dict[str, Any]) -> tuple[bool, str, list[str]]:
        return await self.in_thread(_checked, json.dumps(schema))

    async def _can(self, ability: str, model: ServedModel) -> bool:
        """Whether the model's workers can do this."""
        return ability in await self._abilities_of(model)

    async def _abilities_of(self, model: ServedModel) -> frozenset[str]:
        """What the model's workers can do. Where none has been up to say so, what those of its kind can."""
        if time.monotonic() >= self._abilities_until:
            snapshot = await self.link.snapshot()
            # A model none of whose workers is there keeps those that it had: they will come back.
            self._abilities |= {
                entry["name"]: frozenset(entry["abilities"]) for entry in snapshot.get("models", ()) if entry["abilities"]
            }
            self._abilities_until = time.monotonic() + ABILITIES_S
        return self._abilities.get(model.name, model.assumed)


# Compiling a schema takes up to 20 ms, and clients send the same one again and again.
_checked = lru_cache(maxsize=256)(check_schema)


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
            system_tokens=prompt.shared,
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
