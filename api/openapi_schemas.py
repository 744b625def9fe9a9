"""The JSON schemas of every body this API takes and gives (pure).

Says what api/normalize, api/normalize_completion and api/responses do; fields' names come from the sets that
normalization knows. Knows no paths. Invariant: a body that fits its schema is refused only for what a schema does not
say: fields that need each other, names that are used twice, ids of no token, models that are not served, sizes.
"""

from typing import Any

from api import normalize, normalize_completion
from api.responses import API_ERROR, AUTHENTICATION, INVALID, OVERLOADED

Schema = dict[str, Any]

_NOTES = {
    "max_tokens": "Clamped to the server's limit and to the room left in the context, never refused; 1024 when absent.",
    "max_completion_tokens": "Counts when max_tokens is absent or null.",
    "stream_options": "Usage is sent at the end of every stream whatever this says.",
    "seed": "Any integer; choices are seeded apart.",
    "top_k": "0 and -1 are off.",
    "top_logprobs": "More than 0 needs logprobs to be true.",
    "priority": "Up to what the key allows.",
    "reasoning_effort": "none turns thinking off, the rest on.",
    "chat_template_kwargs": "Variables for the chat template; enable_thinking defaults to false.",
    "tool_choice": "required and a named function need tools.",
}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def string(**more: Any) -> Schema:
    return {"type": "string", **more}


def _optional(schema: Schema) -> Schema:
    """As `schema`, or null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: dict[str, Schema], required: tuple[str, ...] = (), **more: Any) -> Schema:
    found: Schema = {"type": "object", "properties": properties}
    return found | ({"required": list(required)} if required else {}) | more


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_TOKEN_IDS = _array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_POSITIVE = {"type": "integer", "minimum": 1}
# What both generating routes read alike.
_SHARED: dict[str, Schema] = {
    "max_tokens": _POSITIVE,
    "max_completion_tokens": _POSITIVE,
    "stream": _BOOLEAN,
    "stream_options": {"type": "object"},
    "stop": {"anyOf": [string(minLength=1), _array(string(minLength=1), maxItems=16)]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e30},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {
        "type": "object",
        # Ids as text; whether there is such a token depends on the model.
        "propertyNames": string(pattern="^[0-9]{1,9}$"),
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "n": {"type": "integer", "minimum": 1, "maximum": 16},
    "priority": {"type": "integer", "minimum": -10, "maximum": 10},
}
_OF_CHAT: dict[str, Schema] = {
    "logprobs": _BOOLEAN,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "tools": _array(ref("Tool")),
    "tool_choice": {"anyOf": [string(enum=["none", "auto", "required"]), ref("NamedTool")]},
    "parallel_tool_calls": _BOOLEAN,
    "response_format": ref("ResponseFormat"),
    "chat_template_kwargs": _object(dict.fromkeys(normalize.RESERVED_KWARGS, False)),  # type: ignore[arg-type]
    "reasoning_effort": string(enum=list(normalize.EFFORTS)),
}
_OF_TEXT: dict[str, Schema] = {
    "logprobs": {"type": "integer", "minimum": 0, "maximum": normalize_completion.MOST_LOGPROBS},
    "echo": {**_BOOLEAN, "description": "Not together with logprobs."},
}
_PROMPT = {
    "anyOf": [
        string(),
        _array(string(), minItems=1),
        {**_TOKEN_IDS, "minItems": 1},
        _array({**_TOKEN_IDS, "minItems": 1}, minItems=1),
    ]
}


def _request(
    required: dict[str, Schema],
    optional: dict[str, Schema],
    refused: dict[str, str],
    exempt: frozenset[str],
    strict: bool,
) -> Schema:
    properties = dict(required)
    for name, schema in optional.items():
        properties[name] = _optional(schema) | ({"description": _NOTES[name]} if name in _NOTES else {})
    for name, reason in refused.items():
        properties[name] = {"type": "null", "description": f"Not supported{reason}."}
    for name in sorted(exempt):
        properties[name] = {"description": "Accepted and not used."}
    return _object(properties, tuple(required), **({"additionalProperties": False} if strict else {}))


def schemas(strict: bool) -> dict[str, Schema]:
    return _requests(strict) | _chat_parts() | _replies() | _rest()


def _requests(strict: bool) -> dict[str, Schema]:
    messages = _array(ref("Message"), minItems=1)
    names = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
    of_template = {name: _OF_CHAT[name] for name in names}
    return {
        "ChatRequest": _request(
            {"model": string(), "messages": messages}, _SHARED | _OF_CHAT, normalize.REFUSED, normalize.EXEMPT, strict
        ),
        "CompletionRequest": _request(
            {"model": string(), "prompt": _PROMPT},
            _SHARED | _OF_TEXT,
            normalize_completion.REFUSED,
            normalize.EXEMPT,
            strict,
        ),
        "TokenizeRequest": {
            "oneOf": [
                _request(
                    {"prompt": string()},
                    {"model": string()},
                    {"messages": " beside a prompt"},
                    normalize.EXEMPT,
                    strict,
                ),
                _request(
                    {"messages": messages},
                    {"model": string(), **of_template},
                    {"prompt": " beside messages"},
                    normalize.EXEMPT,
                    strict,
                ),
            ],
        },
        "DetokenizeRequest": _request(
            {"tokens": _TOKEN_IDS}, {"model": string()}, {}, normalize.EXEMPT, strict
        ),
    }


def _chat_parts() -> dict[str, Schema]:
    call = _object(
        {
            "id": _optional(string()),
            "type": {"const": "function"},
            "function": _object(
                {"name": string(), "arguments": {"type": ["string", "object", "null"]}}, ("name",)
            ),
        },
        ("function",),
    )
    function = _object(
        {
            "name": string(pattern="^[a-zA-Z0-9_.-]{1,64}$"),
            "description": _optional(string()),
            "parameters": _optional({"type": "object"}),
            "strict": _optional(_BOOLEAN),
        },
        ("name",),
    )
    schema = _object({"schema": _optional({"type": "object"}), "strict": _optional(_BOOLEAN)})
    return {
        "Message": _object(
            {
                "role": string(),
                "content": {
                    "anyOf": [string(), {"type": "null"}, _array(ref("TextPart"))],
                    "description": "An assistant's earlier message may hold parts of type refusal as well.",
                },
                "refusal": _optional(string()),
                "name": _optional(string()),
                "tool_call_id": _optional(string()),
                "tool_calls": _optional(_array(call)),
                "function_call": {"type": "null"},
            },
            ("role",),
        ),
        "TextPart": _object({"type": {"const": "text"}, "text": string()}, ("type", "text")),
        "Tool": _object({"type": {"const": "function"}, "function": function}, ("type", "function")),
        "NamedTool": _object(
            {"type": {"const": "function"}, "function": _object({"name": string()}, ("name",))}, ("type", "function")
        ),
        "ResponseFormat": {
            "anyOf": [
                _object(
                    {"type": string(enum=["text", "json_object"]), "json_schema": _optional(schema)}, ("type",)
                ),
                _object({"type": {"const": "json_schema"}, "json_schema": schema}, ("type", "json_schema")),
            ]
        },
    }


def _replies() -> dict[str, Schema]:
    message = _object(
        {
            "role": {"const": "assistant"},
            "content": {"type": ["string", "null"]},
            "reasoning_content": string(),
            "tool_calls": _array({"type": "object"}),
        },
        ("role", "content"),
    )
    finish = string(enum=["stop", "length", "tool_calls"])
    logprobs = {"type": ["object", "null"]}
    head = {"id": string(), "created": _COUNT, "model": string(), "system_fingerprint": string()}

    def reply(kind: str, choice: dict[str, Schema], usage: bool = True) -> Schema:
        choices = _array(_object({"index": _COUNT, "logprobs": logprobs} | choice, ("index", *choice)))
        shown = {**head, "object": {"const": kind}, "choices": choices, "usage": ref("Usage")}
        return _object(shown, (*head, "object", "choices", *(["usage"] if usage else [])))

    return {
        "ChatReply": reply("chat.completion", {"message": message, "finish_reason": finish}),
        "ChatChunk": reply(
            "chat.completion.chunk", {"delta": {"type": "object"}, "finish_reason": _optional(finish)}, usage=False
        ),
        "CompletionReply": reply("text_completion", {"text": string(), "finish_reason": finish}),
        "CompletionChunk": reply(
            "text_completion", {"text": string(), "finish_reason": _optional(finish)}, usage=False
        ),
        "Usage": _object(
            {
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "total_tokens": _COUNT,
                "prompt_tokens_details": _object({"cached_tokens": _COUNT}, ("cached_tokens",)),
                "completion_tokens_details": _object({"reasoning_tokens": _COUNT}, ("reasoning_tokens",)),
            },
            (
                "prompt_tokens",
                "completion_tokens",
                "total_tokens",
                "prompt_tokens_details",
                "completion_tokens_details",
            ),
        ),
        "TokenizeReply": _object(
            {"tokens": _TOKEN_IDS, "count": _COUNT, "max_model_len": _COUNT}, ("tokens", "count", "max_model_len")
        ),
        "DetokenizeReply": _object({"prompt": string()}, ("prompt",)),
    }


def _rest() -> dict[str, Schema]:
    model = {
        "id": string(),
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": string(),
        "context_length": _COUNT,
        "lanes": _array(string()),
        "abilities": _array(string()),
        "state": string(),
    }
    memory = dict.fromkeys(("active", "cache", "peak", "budget"), _COUNT)
    worker = {
        **dict.fromkeys(("name", "host", "model"), string()),
        **dict.fromkeys(("pid", "slots", "running", "kv_tokens", "kv_tokens_used", "step_age_ms", "restarts"), _COUNT),
        "state": string(enum=["loading", "ready", "draining", "stuck", "failed"]),
        "lanes": _array(string()),
        "memory": _object(memory, tuple(memory)),
    }
    queue = dict.fromkeys(("waiting", "reserved", "oldest_ms"), _COUNT)
    limits = dict.fromkeys(("max_inflight", "max_queue"), _COUNT)
    counts = {"type": "object", "additionalProperties": _COUNT}
    pool = {
        "workers": _array(_object(worker, tuple(worker))),
        "queue": _object(queue, tuple(queue)),
        "limits": _object(limits, tuple(limits)),
        "refused": counts,
        "finished": counts,
        "epoch": string(),
        "version": string(),
    }
    error = {
        "message": string(),
        "type": string(enum=[INVALID, AUTHENTICATION, OVERLOADED, API_ERROR]),
        "code": {"type": ["string", "null"]},
        "param": {"type": ["string", "null"]},
    }
    return {
        "Model": _object(model, tuple(model)),
        "ModelList": _object({"object": {"const": "list"}, "data": _array(ref("Model"))}, ("object", "data")),
        "Health": _object({"status": string()}, ("status",)),
        "Pool": _object(pool, tuple(pool)),
        "Error": _object({"error": _object(error, tuple(error))}, ("error",)),
    }
