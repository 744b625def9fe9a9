"""Markers and parser are those that mlx-lm itself would use for the model's folder."""

import json
from pathlib import Path

import pytest
from mlx_lm import tokenizer_utils
from tokenizers import AddedToken, Tokenizer

from worker.engine import Markup
from worker.engines import markup
from worker.router import MOST

TEMPLATES = {
    "minimax_m2": "<minimax:tool_call>",
    "gemma4": "<|tool_call>x<tool_call|>",
    "function_gemma": "<start_function_call>",
    "longcat": "<longcat_tool_call>",
    "glm47": "<arg_key>",
    "pythonic": "<|tool_call_start|>",
    "qwen3_coder": "<tool_call>\n<function=x>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minicpm5": '<function name="x"><param name="y">',
    "mistral": "[TOOL_CALLS]",
    "muse_spark": "<atem:function_calls>",
    "json_tools": "<tool_call>{{ tool_call.name }}</tool_call>",
}


def folder(tmp_path: Path, template: object, **config: object) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return tmp_path


def tokenizer(tiny_model: Path, *special: str) -> Tokenizer:
    found = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return found


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Tokenizer:
    return tokenizer(tiny_model)


@pytest.mark.parametrize("parser", TEMPLATES)
def test_a_template_names_its_format(tmp_path: Path, plain: Tokenizer, parser: str) -> None:
    import importlib

    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    found = markup.read(folder(tmp_path, TEMPLATES[parser]), plain)
    assert (found.tool_start, found.tool_end) == (module.tool_call_start, module.tool_call_end)
    assert found.parse is module.parse_tool_call or parser in markup.LENIENT
    assert (found.form is not None) == (parser in ("json_tools", "mistral", "kimi_k2"))


def test_mlx_lm_reads_the_same_from_the_same_folder(tiny_model: Path) -> None:
    theirs = tokenizer_utils.load(tiny_model)
    ours = markup.read(tiny_model, Tokenizer.from_file(str(tiny_model / "tokenizer.json")))
    assert (theirs.think_start, theirs.tool_call_start, theirs.tool_parser) == (None, None, None)
    assert (ours.think_start, ours.tool_start, ours.parse) == ("", "", None)


def test_thinking_is_known_by_its_tokens_and_else_by_the_template(
    tmp_path: Path, tiny_model: Path, plain: Tokenizer
) -> None:
    where = folder(tmp_path, "hello")
    assert markup.read(where, plain).think_start == ""
    for special, markers in (
        (("<think>", "</think>"), ("<think>", "</think>")),
        (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
    ):
        found = markup.read(where, tokenizer(tiny_model, *special))
        assert (found.think_start, found.think_end) == markers
        assert len(found.router.forms(found.think_start)) == 2
    assert markup.read(folder(tmp_path, "{{ m.split('</think>') }}"), plain).think_end == "</think>"


def test_kimi_k3_is_known_by_its_tokens(tmp_path: Path, tiny_model: Path) -> None:
    known = tokenizer(tiny_model, "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    found = markup.read(folder(tmp_path, ""), known)
    assert found.tool_start == "<|open|>tools<|sep|>" and "<|open|>response<|sep|>" in found.structure


def test_a_configuration_may_name_its_format(tmp_path: Path, plain: Tokenizer) -> None:
    found = markup.read(folder(tmp_path, "x", tool_parser_type="laguna", chat_template_type="muse_spark"), plain)
    assert found.tool_start == "<tool_call>" and found.opening == "header" and found.states["header"]
    for odd in ("no_such_format", "../json_tools", 5):
        found = markup.read(folder(tmp_path, "x", tool_parser_type=odd, chat_template_type=odd), plain)
        assert found == Markup(router=found.router)


def test_templates_are_found_wherever_a_folder_keeps_them(tmp_path: Path, plain: Tokenizer) -> None:
    assert markup.read(tmp_path, plain).parse is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert markup.read(tmp_path, plain).parse is None
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    assert markup.read(folder(tmp_path, named), plain).tool_start == "[TOOL_CALLS]"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "<longcat_tool_call>"}))
    assert markup.read(tmp_path, plain).tool_start == "<longcat_tool_call>"
    (tmp_path / "chat_template.jinja").write_text("<arg_key>")
    assert markup.read(tmp_path, plain).tool_start == "<tool_call>"


def test_thousands_of_special_tokens_leave_room_for_those_that_matter(tmp_path: Path, tiny_model: Path) -> None:
    many = tokenizer(tiny_model, *(f"<unused{number}>" for number in range(MOST + 50)), "[TOOL_CALLS]", "[ARGS]")
    router = markup.read(folder(tmp_path, "[TOOL_CALLS][ARGS]"), many).router
    assert all(router.written(many.token_to_id(text)) for text in ("[TOOL_CALLS]", "[ARGS]"))


def test_a_lenient_parser_takes_only_what_is_offered(tmp_path: Path, plain: Tokenizer) -> None:
    parse = markup.read(folder(tmp_path, "<arg_key>"), plain).parse
    assert parse is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parse("f", tools)["name"] == "f"
    assert parse("g<arg_key>a</arg_key><arg_value>1</arg_value>", tools)["name"] == "g"
    with pytest.raises(ValueError):
        parse("some words", tools)
