"""The tools of a chat and which of them the model must or may call (pure).

Owns `tools`, `tool_choice` and `parallel_tool_calls`. Whether a template knows tools is the prompt's business,
whether a lane can enforce a choice the worker's. Invariant: a named choice names a tool that is given.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from api.fields import check_size, refuse, shown, take_boolean

# OpenAI's rule for names; a longer or stranger one would not survive other servers' parsers either.
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """definitions: as the client gave them. choice: none, auto, required, or a function's name with named set."""

    definitions: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    named: bool = False
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """What the template is shown: nothing when no call is wanted."""
        return self.definitions if self.choice != "none" or self.named else []

    @property
    def forced(self) -> bool:
        """Whether the model must call one."""
        return self.named or self.choice == "required"

    def packed(self) -> str:
        """JSON text for the worker; "" when no tool may be called."""
        if not self.offered:
            return ""
        wanted = {"tools": self.definitions, "choice": self.choice, "named": self.named, "parallel": self.parallel}
        return json.dumps(wanted, ensure_ascii=False, separators=(",", ":"))


def checked_tools(body: dict[str, Any]) -> Tools:
    """The tools of `body`. Raises RequestError."""
    parallel = take_boolean(body, "parallel_tool_calls", True)
    definitions = _checked_definitions(body.get("tools"))
    choice, named = _checked_choice(body.get("tool_choice"), [tool["function"]["name"] for tool in definitions])
    return Tools(definitions, choice, named, parallel)


def _checked_definitions(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise refuse("tools", f"tools must be an array, got {shown(tools)}")
    seen = set()
    for index, tool in enumerate(tools):
        name = _check_definition(f"tools[{index}]", tool)
        if name in seen:
            raise refuse("tools", f"tools[{index}]: there are two functions named {name}")
        seen.add(name)
    check_size("tools", tools)
    return tools


def _check_definition(where: str, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise refuse("tools", f"{where} must be an object of type function with a function, got {shown(tool)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(
            "tools",
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores, got {shown(name)}",
        )
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise refuse("tools", f"{where}.function.description must be a string")
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise refuse(
            "tools", f"{where}.function.parameters must be a JSON schema object, got {shown(function['parameters'])}"
        )
    if not isinstance(function.get("strict", False), (bool, type(None))):
        raise refuse("tools", f"{where}.function.strict must be true or false")
    return name


def _checked_choice(choice: Any, names: list[str]) -> tuple[str, bool]:
    if choice is None:
        return ("auto" if names else "none"), False
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise refuse(
                "tool_choice", f"tool_choice must be none, auto, required or a named function, got {shown(choice)}"
            )
        if choice == "required" and not names:
            raise refuse("tool_choice", "tool_choice is required, but there are no tools")
        return (choice if names else "none"), False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(
            "tool_choice", f"tool_choice must be none, auto, required or a named function, got {shown(choice)}"
        )
    if name not in names:
        raise refuse("tool_choice", f"tool_choice names {shown(name)}, which is not among the tools")
    return name, True
