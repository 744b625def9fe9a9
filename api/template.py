"""A model's chat template, rendered as Hugging Face renders it (jinja2's sandbox).

Owns the environment and what can be known of a template by reading it. Never sees a tokenizer. Invariant: a template
gets no object through which it could reach anything but what it was given.
"""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

_ITERATES_CONTENT = re.compile(r"\{%-?\s*for\s+\w+\s+in\s+[^%]*\bcontent\b")


class TemplateComplaint(Exception):
    """The template refuses these messages; the text is for the client."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: marks assistant text for training; here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Template:
    """A compiled template and what it reads. Raises jinja2.TemplateSyntaxError."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _environment()
        self._compiled = environment.from_string(source)
        syntax = environment.parse(source)
        self._variables = jinja2.meta.find_undeclared_variables(syntax)
        literals = [node.data for node in syntax.find_all(jinja2.nodes.TemplateData)]
        literals += [node.value for node in syntax.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        # Joined by a character that no token holds, so that nothing is found across two of them.
        self.literals = "\0".join(literals)

    @property
    def knows_tools(self) -> bool:
        """Whether tools would be shown to the model at all."""
        return "tools" in self._variables

    @property
    def mentions_tool_calls(self) -> bool:
        """Whether null content can be told from empty content by what else the message holds."""
        return "tool_calls" in self.source

    @property
    def knows_developer(self) -> bool:
        """Whether a developer message has a place of its own."""
        return "developer" in self.source

    @property
    def takes_parts(self) -> bool:
        """Whether it walks over content parts by itself."""
        return _ITERATES_CONTENT.search(self.source) is not None

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt's text. Raises TemplateComplaint."""
        try:
            return self._compiled.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateComplaint(str(error) or type(error).__name__) from None
        except Exception as error:
            # A template that trips over what the client gave: its own way of complaining.
            raise TemplateComplaint(
                f"The chat template cannot render these messages ({type(error).__name__})."
            ) from None
