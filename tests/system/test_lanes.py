"""The serial lanes over HTTP: block diffusion on the tiny DiffusionGemma, speculation on tiny llamas, scripted blocks."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures import tiny_diffusion, tiny_model
from fixtures.template_styles import STYLES, text_of
from scripts.harness import Harness, script, wait_for
from tests.system.conftest import scripted
from tests.system.streams import Stream

pytestmark = [pytest.mark.lanes, pytest.mark.system, pytest.mark.slow]

CANVAS = 16


@dataclass
class Reply:
    """A streamed reply in its pieces, which are its tokens where each has a text."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def stream(harness: Harness, content: str, **fields: Any) -> Reply:
    """A chat, streamed to its end."""
    reply = Reply()
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True, **fields}
    with httpx.stream("POST", harness.url + "/v1/chat/completions", json=body, timeout=60) as answer:
        reply.status, reply.headers = answer.status_code, dict(answer.headers)
        for line in answer.iter_lines():
            reply.done |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                reply.pieces += [choice["delta"]["content"]] if choice["delta"].get("content") else []
                reply.reasoning += [choice["delta"]["reasoning_content"]] if choice["delta"].get("reasoning_content") else []
                reply.finish = choice["finish_reason"] or reply.finish
            reply.usage = event.get("usage") or reply.usage
    return reply


def whole(harness: Harness, content: str, **fields: Any) -> dict[str, Any]:
    """A chat as one object."""
    status, reply = harness.chat(content, **fields)
    assert status == 200, reply
    return reply


# --- Block diffusion --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusion(tiny_diffusion_model: Path) -> Iterator[Harness]:
    with Harness("--api-processes", "1", model=tiny_diffusion_model) as harness:
        yield harness


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Full canvases, each denoised position by position: a block takes a while."""
    model = tiny_diffusion.build(tmp_path_factory.mktemp("models") / "wide", canvas=256)
    flags = ("--api-processes", "1", "--diffusion-threshold", "1", "--diffusion-steps", "8", "--queue-timeout", "120")
    with Harness(*flags, model=model) as harness:
        yield harness


def test_a_reply_comes_in_blocks_and_says_its_lane(diffusion: Harness) -> None:
    reply = stream(diffusion, "hello", seed=1, max_tokens=40)
    assert (reply.finish, reply.usage["completion_tokens"], reply.headers["x-millpond-lane"]) == ("length", 40, "serial")
    entry = diffusion.get("/v1/models/m")[1]
    assert (entry["lanes"], entry["abilities"]) == (["serial"], ["seed", "tools"])
    (worker,) = diffusion.get("/v1/pool")[1]["workers"]
    assert (worker["slots"], worker["lanes"]) == (1, ["serial"])


def test_a_seed_makes_a_reply_reproducible_whole_or_streamed(diffusion: Harness) -> None:
    replies = [stream(diffusion, "hello", seed=7, max_tokens=40).text for _ in range(2)]
    replies.append(whole(diffusion, "hello", seed=7, max_tokens=40)["choices"][0]["message"]["content"])
    assert len(set(replies)) == 1 and replies[0]
    assert stream(diffusion, "hello", max_tokens=40).text != stream(diffusion, "hello", max_tokens=40).text
    choices = whole(diffusion, "hello", seed=7, max_tokens=40, n=3)["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 3


def test_sampling_that_denoising_cannot_honour_is_listed_and_changes_nothing(diffusion: Harness) -> None:
    plain = stream(diffusion, "hello", seed=7, max_tokens=20)
    given = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "presence_penalty": 1, "logit_bias": {"5": 9}, "user": "me"}
    reply = stream(diffusion, "hello", seed=7, max_tokens=20, **given)
    assert reply.text == plain.text and "x-millpond-ignored" not in plain.headers
    listed = reply.headers["x-millpond-ignored"].split(", ")
    assert set(listed) == set(given) and "seed" not in listed
    # What is not sampling is refused by name.
    for name, value in (("logprobs", True), ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": True}})):
        status, error = diffusion.chat("hello", **{name: value})
        assert (status, error["error"]["param"]) == (400, name)


def test_max_tokens_may_end_a_block_anywhere(diffusion: Harness) -> None:
    full = stream(diffusion, "hello", seed=3, max_tokens=48)
    assert len(full.pieces) == 48, "this seed's tokens all have a text"
    for most in (1, 2, 15, 16, 17, 33):
        reply = stream(diffusion, "hello", seed=3, max_tokens=most)
        # A canvas is no longer than what may be said, which is other noise; a last block of full size is the same.
        assert (reply.finish, reply.usage["completion_tokens"]) == ("length", most)
        assert reply.pieces[: most // CANVAS * CANVAS] == full.pieces[: most // CANVAS * CANVAS]


def test_stop_strings_and_stop_ids_end_it_at_any_border(diffusion: Harness) -> None:
    full = stream(diffusion, "hello", seed=3, max_tokens=48)
    for place in (0, 14, 15, 16, 31):
        # One token; a part of one; two tokens; four of them.
        two = full.pieces[place][-1] + full.pieces[place + 1]
        for stop in (full.pieces[place], full.pieces[place][1:], two, "".join(full.pieces[place : place + 4])):
            reply = stream(diffusion, "hello", seed=3, max_tokens=48, stop=[stop, "never said"])
            assert (reply.text, reply.finish) == (full.text[: full.text.find(stop)], "stop"), (place, stop)
        answer = whole(diffusion, "hello", seed=3, max_tokens=48, stop=two)
        assert answer["choices"][0]["message"]["content"] == full.text[: full.text.find(two)]


def test_a_stop_id_is_not_counted_and_nothing_of_its_block_comes_after_it(diffusion: Harness) -> None:
    full = stream(diffusion, "hello", seed=3, max_tokens=48)
    # One whose letters are no part of an earlier word.
    place = next(n for n in range(17, 48) if full.text.find(full.pieces[n]) == len("".join(full.pieces[:n])))
    reply = stream(diffusion, "hello", seed=3, max_tokens=48, stop=full.pieces[place])
    assert (reply.pieces, reply.usage["completion_tokens"]) == (full.pieces[:place], place)


def test_an_end_of_sequence_within_a_block(tmp_path: Path, diffusion: Harness) -> None:
    from tokenizers import Tokenizer

    full = stream(diffusion, "hello", seed=3, max_tokens=48)
    probe = Tokenizer.from_file(str(tiny_diffusion.build(tmp_path / "probe") / "tokenizer.json"))
    (token,) = probe.encode(full.pieces[21], add_special_tokens=False).tokens
    with Harness("--api-processes", "1", model=tiny_diffusion.build(tmp_path / "ends", eos=[token])) as harness:
        reply = stream(harness, "hello", seed=3, max_tokens=48)
    first = full.pieces.index(full.pieces[21])
    assert (reply.pieces, reply.finish, reply.usage["completion_tokens"]) == (full.pieces[:first], "stop", first)


def test_bursts_of_whole_canvases_never_cut_a_reader_that_keeps_up(slow: Harness) -> None:
    replies = [Stream(slow, "hello", max_tokens=600, seed=number) for number in range(2)]
    for reply in replies:
        assert reply.over(60).whole, (reply.status, reply.error, reply.cut)
        assert reply.finish == "length" and reply.pieces == 600


def test_ten_requests_wait_for_one_and_each_gets_its_own_reply(diffusion: Harness) -> None:
    wanted = {seed: stream(diffusion, "hello", seed=seed, max_tokens=20).text for seed in range(11)}
    found: dict[int, Reply] = {}

    def ask(seed: int) -> None:
        found[seed] = stream(diffusion, "hello", seed=seed, max_tokens=20)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {seed: reply.text for seed, reply in found.items()} == wanted
    assert all(reply.done for reply in found.values())


def tokens_of(harness: Harness) -> int:
    """What the worker has committed since its start."""
    (worker,) = harness.snapshot()["workers"]
    return worker["tokens"]


def test_a_client_that_leaves_while_a_block_is_denoised_gets_no_further_block(slow: Harness) -> None:
    wait_for(slow.idle, 30, "idle")
    before, cancelled = tokens_of(slow), slow.snapshot()["finished"].get("cancelled", 0)
    with httpx.stream(
        "POST",
        slow.url + "/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 8000},
        timeout=60,
    ) as answer:
        next(line for line in answer.iter_lines() if '"content":" ' in line)
    wait_for(slow.idle, 30, "its slot is free")
    assert slow.snapshot()["finished"]["cancelled"] == cancelled + 1
    # Another reply, so that the worker has reported since.
    again = stream(slow, "hello", max_tokens=10, seed=1)
    assert again.usage["completion_tokens"] == 10
    wait_for(lambda: tokens_of(slow) >= before + 256 + 10, 10, "reported")
    # The block that was shown, and the one that was in the making: the third never began.
    assert tokens_of(slow) - before <= 2 * 256 + 10


def test_a_client_that_leaves_the_queue_costs_nothing(slow: Harness) -> None:
    wait_for(slow.idle, 30, "idle")
    running = Stream(slow, "hello", max_tokens=500, seed=1).flowing()
    with httpx.Client(timeout=60) as client, pytest.raises(httpx.ReadTimeout):
        client.post(
            slow.url + "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hello"}]},
            timeout=0.2,
        )
    assert running.over(60).whole
    wait_for(slow.idle, 10, "idle")


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path, tiny_diffusion_model: Path) -> None:
    (tmp_path / "mlx_vlm").mkdir()
    absent = "raise ModuleNotFoundError(\"No module named 'mlx_vlm'\", name='mlx_vlm')\n"
    (tmp_path / "mlx_vlm" / "__init__.py").write_text(absent)
    harness = Harness(model=tiny_diffusion_model, environment={"PYTHONPATH": str(tmp_path)})
    try:
        harness.start()
        assert harness.wait_end(60) == 1, harness.output
        assert "Traceback" not in harness.output
        said = [line for line in harness.lines if "failed to start" in line]
        assert len(said) == 1 and said[0].rstrip().endswith("-m pip install -e '.[diffusion]'"), harness.output
    finally:
        harness.kill()
        shutil.rmtree(harness.folder, ignore_errors=True)


# --- Scripted blocks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Blocks of 256 scripted tokens, from a model with a thought channel."""
    model = tiny_model.build(
        tmp_path_factory.mktemp("models") / "thinker", extra_tokens=STYLES["diffusiongemma"], chat_template=text_of("diffusiongemma")
    )
    with scripted(model, "--scripted-block", "256", MILLPOND_SCRIPTED_RATE="0") as harness:
        yield harness


def told(harness: Harness, tokens: list[str], block: int, **fields: Any) -> Reply:
    """A reply of these tokens in blocks, streamed; the whole one must say the same."""
    content = script(tokens=tokens, block=block).replace("<", "\\u003c")
    reply = stream(harness, content, **fields)
    assert reply.status == 200 and reply.done
    choice = whole(harness, content, **fields)["choices"][0]
    assert (choice["message"].get("content") or "", choice["message"].get("reasoning_content", "")) == (reply.text, "".join(reply.reasoning))
    assert choice["finish_reason"] == reply.finish
    return reply


def test_bursts_of_257_pieces(blocks: Harness) -> None:
    # Every token a piece of its own; what may become a stop string is held back, and comes after the last one.
    content = script(tokens=[" x<"], count=3 * 256, block=256).replace("<", "\\u003c")
    for _ in range(3):
        reply = stream(blocks, content, max_tokens=1000, stop=["<never>"])
        assert (len(reply.pieces), reply.text, reply.done) == (769, " x<" * 768, True)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7])
def test_a_thought_channel_is_told_apart_at_any_border(blocks: Harness, block: int) -> None:
    tokens = ["a ", "thought\n", "<|channel>", "thought", "\n", "I think\n", "of thought", "<channel|>", "then\n", "I say"]
    reply = told(blocks, tokens, block, chat_template_kwargs={"enable_thinking": True})
    assert (reply.text, "".join(reply.reasoning)) == ("a thought\nthen\nI say", "I think\nof thought")
    assert reply.usage["completion_tokens"] == len(tokens)


def test_markers_cut_into_letters_over_borders(blocks: Harness) -> None:
    letters = list("say<|channel>thought\nwhy<channel|>\nso <|chan")
    for block in (1, 4, 9):
        reply = told(blocks, letters, block)
        assert (reply.text, "".join(reply.reasoning)) == ("say\nso <|chan", "why")


def test_a_stop_string_over_a_border_leaks_nothing(blocks: Harness) -> None:
    for block in (1, 2, 3):
        reply = told(blocks, ["one ", "ST", "OP", " never"], block, stop=["STOP"])
        assert (reply.text, reply.finish) == ("one ", "stop")


# --- Speculative decoding ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Harness]:
    """The tiny model, drafted for by a copy of itself."""
    copy = shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "draft")
    with Harness("--api-processes", "1", "--draft-model", str(copy), "--draft-tokens", "4", model=tiny_model) as harness:
        yield harness


@pytest.fixture(scope="module")
def undrafted(tiny_model: Path) -> Iterator[Harness]:
    with Harness("--api-processes", "1", model=tiny_model) as harness:
        yield harness


def test_speculation_changes_nothing_but_the_lane_and_is_counted(drafted: Harness, undrafted: Harness) -> None:
    for number in range(4):
        question = "what is the capital of " + "the world " * number
        plain, quick = (stream(one, question, temperature=0, max_tokens=50) for one in (undrafted, drafted))
        assert (quick.text, quick.finish) == (plain.text, plain.finish)
        assert (plain.headers["x-millpond-lane"], quick.headers["x-millpond-lane"]) == ("batched", "serial+spec")
        details = quick.usage["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted >= 0.9 * (accepted + rejected) and accepted >= 30
        assert "accepted_prediction_tokens" not in plain.usage["completion_tokens_details"]

    def counted() -> bool:
        lines = httpx.get(drafted.url + "/metrics").text.splitlines()
        return any(line.startswith('millpond_draft_tokens_total{kind="accepted"') and float(line.split()[-1]) >= 120 for line in lines)

    wait_for(counted, 10, "the metric")
    assert drafted.get("/v1/models/m")[1]["lanes"] == ["serial+spec", "batched"]


def test_a_request_joins_one_that_is_speculated_for(drafted: Harness) -> None:
    wait_for(drafted.idle, 10, "idle")
    first = Stream(drafted, "hello", temperature=0, max_tokens=3000).flowing(20)
    second = stream(drafted, "hello", temperature=0, max_tokens=10)
    assert not first.ended_at and second.headers["x-millpond-lane"] == "batched"
    assert (second.finish, first.headers["x-millpond-lane"]) == ("length", "serial+spec")
    assert first.over(60).whole


def test_what_cannot_be_speculated_for_runs_batched_and_the_trace_says_why(drafted: Harness) -> None:
    wait_for(drafted.idle, 10, "idle")
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1, "temperature": 1}
    reply = httpx.post(drafted.url + "/v1/chat/completions", json=body, headers={"x-request-id": "why-batched"}, timeout=60)
    assert reply.headers["x-millpond-lane"] == "batched"
    assert "serial+spec: lacks seed; batched: taken" in drafted.command("trace", "why-batched").stdout


def test_a_draft_model_that_does_not_fit_is_said_in_one_line(tiny_model: Path, tiny_sentencepiece_model: Path) -> None:
    for draft, status, words in (
        (str(tiny_sentencepiece_model), 1, "has another vocabulary"),
        ("/nowhere/draft", 2, "there is no folder /nowhere/draft"),
        (f"other={tiny_model}", 2, "MILLPOND_DRAFT_MODEL: no model is called 'other'"),
    ):
        harness = Harness("--draft-model", draft, model=tiny_model)
        try:
            harness.start()
            assert harness.wait_end(60) == status, harness.output
            assert "Traceback" not in harness.output
            assert [line for line in harness.lines if words in line], harness.output
        finally:
            harness.kill()
            shutil.rmtree(harness.folder, ignore_errors=True)
