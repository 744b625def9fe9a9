"""The `messages` of a chat, checked one by one (pure).

Owns what a message may hold. Errors name the field `messages` and, in their text, the message's index. Invariant: what
comes out has a string role, content that is a string, null or a list of text parts, and no other key that is null.
"""

from typing import Any

from api.fields import refuse, shown
from api.responses import RequestError

_MEDIA = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
    "video": "video",
    "video_url": "video",
}


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation ready for a template. Raises RequestError."""
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", "messages must be a non-empty array.")
    return [_checked(index, message) for index, message in enumerate(messages)]


def _wrong(where: str, what: str) -> RequestError:
    return refuse("messages", f"{where} {what}")


def _checked(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise _wrong(where, f"must be an object, got {shown(message)}")
    if not isinstance(message.get("role"), str):
        raise _wrong(f"{where}.role", f"is required and must be a string, got {shown(message.get('role'))}")
    if message.get("function_call") is not None:
        raise _wrong(f"{where}.function_call", "is not supported; use tool_calls")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise _wrong(f"{where}.{name}", f"must be a string, got {shown(message[name])}")
    _check_content(f"{where}.content", message.get("content"), message["role"])
    if not isinstance(message.get("refusal"), (str, type(None))):
        raise _wrong(f"{where}.refusal", f"must be a string or null, got {shown(message['refusal'])}")
    if message.get("tool_calls") is not None:
        _check_tool_calls(f"{where}.tool_calls", message["tool_calls"])
    # SDKs send back whole message objects with every unused key null; a template would take those keys for given, and
    # an empty list of calls for calls.
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    elif "tool_calls" in kept:
        kept["tool_calls"] = [_without_nulls(call) for call in kept["tool_calls"]]
    return kept | {"content": _said(message)}


def _said(message: dict[str, Any]) -> Any:
    # Templates know nothing of refusals; what an assistant said then is what it said.
    content = message.get("content")
    if message["role"] != "assistant":
        return content
    if isinstance(content, list):
        return [{"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part for part in content]
    return message.get("refusal") if content is None else content


def _without_nulls(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in call["function"].items() if value is not None}
    return {name: value for name, value in call.items() if value is not None} | {"function": function}


def _check_content(where: str, content: Any, role: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _wrong(where, f"must be a string, null or an array of text parts, got {shown(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise _wrong(f"{where}[{index}]", f"is of type {kind}: {_MEDIA[kind]} input is not supported")
        if kind not in (("text", "refusal") if role == "assistant" else ("text",)):
            raise _wrong(f"{where}[{index}]", f"must be an object of type text, got {shown(part)}")
        if not isinstance(part.get(kind), str):
            raise _wrong(f"{where}[{index}].{kind}", f"must be a string, got {shown(part.get(kind))}")


def _check_tool_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise _wrong(where, f"must be an array, got {shown(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type") not in (None, "function"):
            raise _wrong(f"{where}[{index}]", "must be an object of type function")
        if not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{index}].function.name", "is required and must be a string")
        if not isinstance(function.get("arguments", ""), (str, dict, type(None))):
            raise _wrong(f"{where}[{index}].function.arguments", "must be a JSON string or an object")
        if call.get("id") is not None and not isinstance(call["id"], str):
            raise _wrong(f"{where}[{index}].id", "must be a string")
