"""Messages to token ids: the model's template, its tokenizer, and the contract's §5.

One PromptSource per served model, used from several threads at once. Knows the files of a model folder, nothing of
requests or HTTP. Invariant: without special-token text in the messages the ids are those that Hugging Face gives;
with it, that text is never a special token.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from api.special_text import Span, SpecialText, free_marks, occurrences, unmarked
from api.template import Template, TemplateComplaint
from api.tokens import Tokens
from common.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# As mlx-lm names them (tokenizer_utils): how models begin to think where a template can leave them thinking.
THOUGHTS_BEGIN = ("<think>", "<longcat_think>", "<|think:start|>", "<|channel>thought", "<|open|>think<|sep|>")
THOUGHT_OPENS, THOUGHT_CLOSES = "<|channel>", "<channel|>"
# Where clients and templates put an assistant's thoughts; the first is the usual one, gpt-oss reads the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
EMPTY_THOUGHT = f"{THOUGHT_OPENS}thought\n{THOUGHT_CLOSES}"


class TooLong(Exception):
    """The prompt is over the limit. tokens: its length; at_least: only a lower bound, it was not tokenized."""

    def __init__(self, tokens: int, limit: int, at_least: bool = False) -> None:
        super().__init__(f"the prompt is {'at least ' if at_least else ''}{tokens} tokens; the limit is {limit}")
        self.tokens = tokens


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. reasoning_open: it ends inside a reasoning block that the template opened. shared: how many
    tokens come before the conversation's first words: the system part, which other conversations begin with too."""

    ids: list[int]
    reasoning_open: bool = False
    shared: int = 0


class PromptSource:
    """Renders and tokenizes for one model. Raises ConfigError for a folder whose files do not allow it."""

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        try:
            self.tokens = Tokens(folder / "tokenizer.json")
            self._templates = {name: Template(source) for name, source in template_sources(folder, config).items()}
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from None
        except Exception as error:  # the tokenizers library raises plain Exception for a bad file
            raise ConfigError(f"cannot read the tokenizer of {folder}: {error}") from None
        self._variables = named_tokens(folder, config)
        start = self._variables.get("bos_token") or self._variables.get("eos_token") or ""
        self._start_of_text = [self.tokens.added[start]] if start in self.tokens.added else self.tokens.encode("\n")
        literals = "\0".join(template.literals for template in self._templates.values())
        # A token is a marker if the tokenizer says so, or if the template itself writes it (Qwen's <tool_response>).
        # Whitespace runs, which some tokenizers add, are text.
        written = {text for text in self.tokens.added if text in literals and text.strip(" \t\r\n\u2581")}
        self._special = SpecialText(self.tokens.special)
        self._markers = SpecialText(self.tokens.special | written)
        has_thoughts = THOUGHT_OPENS in self.tokens.added and THOUGHT_CLOSES in self.tokens.added
        self._head = lru_cache(maxsize=8)(lambda head: tuple(self.tokens.encode(head)))
        self._empty_thought = self.tokens.encode(EMPTY_THOUGHT) if has_thoughts else []

    @property
    def knows_tools(self) -> bool:
        """Whether any of the model's templates shows tools."""
        return any(template.knows_tools for template in self._templates.values())

    def chat(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any], tools: list[dict[str, Any]], limit: int
    ) -> Prompt:
        """The ids of a conversation. Raises TemplateComplaint, TooLong."""
        template = self._template(bool(tools))
        if len(messages) > limit:
            # Each is a token at the very least, and rendering hundreds of thousands takes many seconds.
            raise TooLong(len(messages), limit, at_least=True)
        given = {"messages": prepared(messages, template), "tools": tools or None, "kwargs": kwargs}
        text = self._render(template, given)
        self._refuse_monster(text, limit)
        guarded = self._guarded(template, given, text)
        ids = self.tokens.encode_guarded(text, guarded) if guarded else self.tokens.encode(text)
        if self._empty_thought and not text.rstrip().endswith(THOUGHT_CLOSES):
            ids = ids + self._empty_thought
        if len(ids) > limit:
            raise TooLong(len(ids), limit)
        return Prompt(ids, text.rstrip().endswith(THOUGHTS_BEGIN), self._shared(text, given["messages"], ids))

    def _shared(self, text: str, messages: list[dict[str, Any]], ids: list[int]) -> int:
        """Tokens up to the marker before the first words that are not the system's; 0: not known.

        Whatever is found is checked against the ids, so a template may do to the words what it likes.
        """
        after = 0
        for message in messages:
            words = message.get("content")
            at = text.find(words.strip(), after) if isinstance(words, str) else -1
            if at < 0:
                return 0
            if message["role"] != "system":
                break
            after = at + len(words.strip())
        else:
            return 0
        head = self._head(text[: self.tokens.last_added(text[:at])])
        return len(head) if tuple(ids[: len(head)]) == head else 0

    def text(self, text: str | list[int], limit: int) -> list[int]:
        """The ids of a raw prompt, which is text or already ids. Raises TooLong.

        Text gets the special tokens that the tokenizer itself puts round a text (Llama's <s>), and those written in it
        count: this is where a client speaks to the model without a template. An empty prompt is the start of a text.
        """
        if isinstance(text, str):
            self._refuse_monster(text, limit)
            text = self.tokens.encode(text, add_special=True)
        ids = text or self._start_of_text
        if len(ids) > limit:
            raise TooLong(len(ids), limit)
        return ids

    def _refuse_monster(self, text: str, limit: int) -> None:
        least = self.tokens.more_than(text, limit)
        if least:
            raise TooLong(least, limit, at_least=True)

    def _template(self, with_tools: bool) -> Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        template = self._templates.get("default")
        if template is None:
            raise TemplateComplaint("This model has no chat template; use /v1/completions.")
        return template

    def _render(self, template: Template, given: dict[str, Any]) -> str:
        variables = {**self._variables, **given["kwargs"], "messages": given["messages"], "tools": given["tools"]}
        return template.render({"documents": None, **variables, "add_generation_prompt": True})

    def _guarded(self, template: Template, given: dict[str, Any], text: str) -> list[Span]:
        """Where, in the rendering `text`, special-token text of the client stands.

        Three tries. All markers marked (in an assistant's own earlier words only the special tokens, since templates
        look there for <think> and the like). Then, for templates that look at marked text, special tokens alone. Last,
        when the template does something to them, too: every such token the client wrote is text wherever it stands, so
        the model may miss a turn's end, but nobody can forge one.
        """
        found = self._markers.within(given)
        if not found:
            return []
        marks = free_marks(text)
        for markers in (self._markers, self._special):
            try:
                plain, spans = unmarked(self._render(template, self._marked(given, markers, marks)), marks)
            except TemplateComplaint:
                continue
            if plain == text:
                return spans
        return occurrences(found & self.tokens.special, text)

    def _marked(self, given: dict[str, Any], markers: SpecialText, marks: tuple[str, str]) -> dict[str, Any]:
        messages = [
            (self._special if message["role"] == "assistant" else markers).marked(message, marks)
            for message in given["messages"]
        ]
        others = {name: markers.marked(given[name], marks) for name in ("tools", "kwargs")}
        return {"messages": messages, **others}


def prepared(messages: list[dict[str, Any]], template: Template) -> list[dict[str, Any]]:
    """The messages as this template wants them; the client's own objects stay as they are."""
    return [_prepared(message, template) for message in messages]


def _prepared(message: dict[str, Any], template: Template) -> dict[str, Any]:
    message = _with_reasoning_everywhere(message)
    content = message.get("content")
    if content is None and not template.mentions_tool_calls:
        message["content"] = ""
    elif isinstance(content, list) and not template.takes_parts:
        message["content"] = "".join(part["text"] for part in content)
    if message["role"] == "developer" and not template.knows_developer:
        message["role"] = "system"
    if "tool_calls" in message:
        message["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]
    return message


def _with_reasoning_everywhere(message: dict[str, Any]) -> dict[str, Any]:
    # As Hugging Face has it since transformers 5.
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", "")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": value}}


def template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name, "default" first of all, from wherever the model folder keeps them."""
    if (folder / "chat_template.jinja").is_file():
        sources = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return sources | {path.stem: path.read_text(encoding="utf-8") for path in more}
    stored = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}
    return {"default": stored} if isinstance(stored, str) else {}


def named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like, as templates know them."""
    found = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in NAMED_TOKENS:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        raise ConfigError(f"{path} is not valid JSON") from None
    return value if isinstance(value, dict) else {}
