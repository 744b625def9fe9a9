"""How each of mlx-lm's tool formats is written (pure).

The counterpart of mlx-lm's parsers, for grammars that force a call. Must never know a grammar's text. Invariant: what
is written so, with values that fit their schemas, is read back by the parser of the same name as the same call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_TAG_NAME = re.compile(r"[^\s<>\"'=]+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_WORD = re.compile(r"\w+")


def _has_strings(schema: Schema, types: frozenset[str]) -> bool:
    return "string" in types or not types


def _is_string(schema: Schema, types: frozenset[str]) -> bool:
    return schema.get("type") == "string"


def _is_string_or_untyped(schema: Schema, types: frozenset[str]) -> bool:
    return _is_string(schema, types) or ("type" not in schema and _has_strings(schema, types))


def _never(schema: Schema, types: frozenset[str]) -> bool:
    return False


@dataclass(frozen=True)
class Arguments:
    """Arguments written one by one. key holds %s for the name; end stands after a value, between before the next key.

    is_text: whether the format's parser reads a value of this schema as bare text, and else as JSON. quote: what stands
    on both sides of bare text. names: those that can be written. nested: whether arrays and objects can be. never: what
    bare text may not hold.
    """

    key: str
    end: str
    between: str = ""
    is_text: Callable[[Schema, frozenset[str]], bool] = _has_strings
    quote: str = ""
    names: re.Pattern[str] = _TAG_NAME
    nested: bool = True
    never: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallSyntax:
    """How a format writes the call in a block. head: up to the arguments, with %s for the function's name.

    arguments None: one JSON object.
    """

    head: str
    tail: str = ""
    arguments: Arguments | None = None


_NAMED_JSON = CallSyntax('\n{"name": "%s", "arguments": ', "}\n")
_GLM = CallSyntax("%s", "", Arguments("<arg_key>%s</arg_key><arg_value>", "</arg_value>", is_text=_is_string))

# By the name of mlx-lm's parser.
SYNTAXES: dict[str, CallSyntax] = {
    "function_gemma": CallSyntax(
        "call:%s{", "}", Arguments("%s:", "", ",", quote="<escape>", names=_WORD, nested=False, never=("}",))
    ),
    "gemma4": CallSyntax("call:%s{", "}", Arguments("%s:", "", ",", quote='<|"|>', names=_WORD)),
    "glm47": _GLM,
    "json_tools": _NAMED_JSON,
    "kimi_k2": CallSyntax(
        "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
    "kimi_k3": CallSyntax(
        '<|open|>call tool="%s"<|sep|><|open|>json type="object"<|sep|>',
        "<|close|>json<|sep|><|close|>call<|sep|>",
    ),
    "laguna": _GLM,
    "longcat": _NAMED_JSON,
    "minicpm5": CallSyntax('"%s">', "", Arguments('<param name="%s">', "</param>")),
    "minimax_m2": CallSyntax(
        '\n<invoke name="%s">\n', "</invoke>\n", Arguments('<parameter name="%s">', "</parameter>\n")
    ),
    "mistral": CallSyntax("%s[ARGS]"),
    "muse_spark": CallSyntax(
        '\n<atem:invoke name="%s">\n', "</atem:invoke>\n",
        Arguments('<atem:parameter name="%s">', "</atem:parameter>\n", is_text=_never),
    ),
    "pythonic": CallSyntax("[%s(", ")]", Arguments("%s=", "", ", ", is_text=_never, names=_IDENTIFIER)),
    "qwen3_coder": CallSyntax(
        "\n<function=%s>\n", "</function>\n",
        Arguments("<parameter=%s>\n", "\n</parameter>\n", is_text=_is_string_or_untyped),
    ),
}  # fmt: skip
