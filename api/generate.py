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
from common.json_schema import Enforceable, enforceable

T = TypeVar("T")
# How long the last snapshot counts for what workers can do, which changes only when a model is swapped.
ABILITIES_S = 1.0
ANY_OBJECT = '{"type":"object"}'
# What x-millpond-ignored calls it.
STRICT_TOOLS = "tools.function.strict"


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
        self._abilities: dict[tuple[str, str], frozenset[str]] = {}
        self._abilities_until: dict[tuple[str, str], float] = {}

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
    ) -> Exchange:
        """Reserve, render, submit. Raises RequestError, ServingError."""
        model = await self._agreed(model, lambda one: _check_against_model(chat, one))
        exchange, fingerprint = await self._reserve(chat.n, chat.priority, chat.stream, model, line)

        async def render(fingerprint: str) -> tuple[list[GenerationRequest], str]:
            now = await self._model_for(model, fingerprint)
            if now is not model:
                _check_against_model(chat, now)
            drawn, ignored = await self._sampling(chat.sampling, now)
            not_held = await self._check_tools(chat.tools, now)
            grammar, left_out = await self._grammar(chat.response_format, now)
            exchange.ignored, exchange.enforced = (*ignored, *not_held, *left_out), bool(grammar)
            prompt = await self._prompt(chat, now)
            line.mark("rendered")
            line.prompt_tokens = len(prompt.ids)
            return _chat_requests(chat, now, prompt, drawn, grammar), now.fingerprint

        exchange.submit(*await render(fingerprint), render)
        return exchange

    async def begin_text(
        self, asked: NormalizedCompletion, model: ServedModel, line: RequestLine
    ) -> tuple[Exchange, list[str]]:
        """Reserve, tokenize, submit; choices of one prompt stand together. The exchange, and the prompts' texts to
        echo.

        Raises RequestError, ServingError.
        """

        def check(one: ServedModel) -> None:
            check_bias(asked.sampling, one)
            check_ids([prompt for prompt in asked.prompts if isinstance(prompt, list)], one)

        model = await self._agreed(model, check)
        count = len(asked.prompts) * asked.n
        exchange, fingerprint = await self._reserve(count, asked.priority, asked.stream, model, line)
        texts: list[str] = []

        async def render(fingerprint: str) -> tuple[list[GenerationRequest], str]:
            now = await self._model_for(model, fingerprint)
            if now is not model:
                check(now)
            drawn, exchange.ignored = await self._sampling(asked.sampling, now)
            texts[:] = [
                prompt if isinstance(prompt, str) else now.prompts.tokens.decode(prompt)
                for prompt in (asked.prompts if asked.echo else ())
            ]
            limit = now.prompt_limit(self._max_prompt)
            try:
                prompts = await self.in_thread(lambda: [now.prompts.text(prompt, limit) for prompt in asked.prompts])
            except TooLong as error:
                raise _too_long(error, limit, "prompt") from None
            line.mark("rendered")
            line.prompt_tokens = sum(map(len, prompts))
            return _text_requests(asked, now, prompts, drawn), now.fingerprint

        exchange.submit(*await render(fingerprint), render)
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

    async def _agreed(self, model: ServedModel, check: Callable[[ServedModel], None]) -> ServedModel:
        """The model that passes the check: this one, or the one that has been swapped for it. Raises RequestError."""
        try:
            check(model)
        except RequestError:
            await self.catalog.refresh()
            now = self.models[model.name]
            if now is model:
                raise
            check(now)
            return now
        return model

    async def _model_for(self, model: ServedModel, fingerprint: str) -> ServedModel:
        if fingerprint in ("", model.fingerprint):
            return model
        return await self.catalog.rendered_for(model.name, fingerprint)

    async def _sampling(self, given: dict[str, Any], model: ServedModel) -> tuple[Sampling, tuple[str, ...]]:
        """How the request is drawn, and what the model cannot honour of it. Raises RequestError when strict."""
        if not given and model.defaults == Sampling():
            return model.defaults, ()
        abilities = await self._abilities_of(model)
        return sampling(given, model.defaults, abilities), not_honoured(given, abilities, self._strict)

    async def _prompt(self, chat: NormalizedChat, model: ServedModel) -> Prompt:
        limit = model.prompt_limit(self._max_prompt)

        def rendered() -> Prompt:
            given = (chat.template_kwargs, chat.tools.offered, limit)
            try:
                return model.prompts.chat(chat.messages, *given)
            except TemplateComplaint:
                otherwise = chat.otherwise
                if otherwise is None:
                    raise
                # The sentence of JSON mode in front was ours: a template without system messages is no reason to refuse.
                return model.prompts.chat(otherwise, *given)

        try:
            return await self.in_thread(rendered)
        except TooLong as error:
            raise _too_long(error, limit, "messages") from None
        except TemplateComplaint as error:
            raise refuse("messages", str(error)) from None

    async def _check_tools(self, tools: Tools, model: ServedModel) -> tuple[str, ...]:
        """Every tool's schema is one, and a call that is asked for can be enforced. What of `strict` cannot be kept."""
        if tools.forced and not await self._can("tool_choice", model):
            raise refuse("tool_choice", f"tool_choice: a call cannot be enforced by {model.name}")
        given = {index: tool["function"].get("parameters") for index, tool in enumerate(tools.offered)}
        given = {index: parameters for index, parameters in given.items() if parameters}
        for index, parameters in given.items():
            if parameters.get("type", "object") != "object":
                raise refuse("tools", f"tools[{index}].function.parameters: a function's arguments are of type object")
        # All in one go: each way into a thread and back costs as much as a schema that is known already.
        schemas = (
            await self.in_thread(lambda: [_enforceable(parameters) for parameters in given.values()]) if given else []
        )
        for index, schema in zip(given, schemas, strict=True):
            if not schema.text:
                raise refuse("tools", f"tools[{index}].function.parameters: {schema.why}")
        left_out = {index for index, schema in zip(given, schemas, strict=True) if schema.left_out}
        return self._not_held(tools, left_out)

    def _not_held(self, tools: Tools, left_out: set[int]) -> tuple[str, ...]:
        # A call that the model makes of its own accord is free text until it is one; a forced one is held to its schema,
        # as far as the grammar goes.
        broken = [
            index
            for index, tool in enumerate(tools.offered)
            if tool["function"].get("strict") and (not tools.forced or index in left_out)
        ]
        if broken and self._strict:
            raise refuse("tools", f"tools[{broken[0]}].function.strict cannot be honoured with this tool_choice")
        return (STRICT_TOOLS,) if broken else ()

    async def _grammar(self, wanted: ResponseFormat, model: ServedModel) -> tuple[str, list[str]]:
        """The schema that the reply is held to, "" for none, and what of the client's is not enforced."""
        if not wanted.json_mode:
            return "", []
        given = wanted.schema if wanted.kind == "json_schema" else None
        schema = await self.in_thread(_enforceable, given) if given else Enforceable(ANY_OBJECT)
        if not schema.text:
            raise refuse("response_format", f"response_format.json_schema.schema: {schema.why}")
        enforced = await self._can("grammar", model)
        if wanted.strict and not enforced:
            raise refuse("response_format", "response_format: strict schemas cannot be enforced by this model")
        if wanted.strict and schema.left_out:
            because = f" ({schema.why})" if schema.why else ""
            raise refuse(
                "response_format",
                f"response_format: strict, but these keywords cannot be enforced: {', '.join(schema.left_out)}{because}",
            )
        if not enforced:
            return "", []
        return schema.text, [f"response_format.{keyword}" for keyword in schema.left_out]

    async def _can(self, ability: str, model: ServedModel) -> bool:
        """Whether the model's workers can do this."""
        return ability in await self._abilities_of(model)

    async def _abilities_of(self, model: ServedModel) -> frozenset[str]:
        """What the model's workers can do. Where none has been up to say so, what those of its kind can."""
        known_as = (model.name, model.fingerprint)
        if time.monotonic() >= self._abilities_until.get(known_as, 0.0):
            snapshot = await self.link.snapshot()
            # A model none of whose workers is there keeps those that it had: they will come back.
            self._abilities |= {
                (entry["name"], entry["fingerprint"]): frozenset(entry["abilities"])
                for entry in snapshot.get("models", ())
                if entry["abilities"]
            }
            # Of each by itself: a model that was swapped in is asked about at once, one without workers not by every request.
            self._abilities_until[known_as] = time.monotonic() + ABILITIES_S
        return self._abilities.get(known_as) or self._abilities.get((model.name, ""), model.assumed)


# Compiling one of this size takes most of a second, in which nothing else of this process runs; as text in the prompt it
# would be longer than most contexts.
MOST_SCHEMA_CHARACTERS = 2**18

# Compiling a schema takes up to 20 ms, and clients send the same one again and again.
_compiled = lru_cache(maxsize=64)(enforceable)


def _enforceable(schema: dict[str, Any]) -> Enforceable:
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MOST_SCHEMA_CHARACTERS:
        return Enforceable("", f"a schema may have at most {MOST_SCHEMA_CHARACTERS} characters")
    return _compiled(text)


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
    tools = chat.tools.packed()
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
            tools=tools,
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
