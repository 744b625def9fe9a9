"""Block diffusion on the tiny DiffusionGemma: blocks, ends, seeds; and what mlx-vlm promises of itself."""

import inspect
import re
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from common.errors import ConfigError
from common.generation import GenerationRequest, Sampling
from common.models import ModelChoice
from tests.worker.driving import Reply, collect, rid, run
from worker import engines
from worker.engine import Committed, Ended
from worker.engines import diffusion
from worker.engines.diffusion import Denoising, DiffusionGemma
from worker.engines.serial import SerialEngine
from worker.engines.text import Texts
from worker.settings import WorkerSettings

pytestmark = [pytest.mark.lanes, pytest.mark.slow]

ONE, TWO = rid(1), rid(2)
CANVAS = 16


def loaded(folder: Path, **options: object) -> SerialEngine:
    engine = SerialEngine(folder, lambda texts, progress: DiffusionGemma(folder, texts, progress, **options))  # type: ignore[arg-type]
    engine.load(lambda words: None)
    return engine


@pytest.fixture(scope="module")
def engine(tiny_diffusion_model: Path) -> SerialEngine:
    return loaded(tiny_diffusion_model)


def ask(max_tokens: int = 40, seed: int | None = 5, prompt: tuple[int, ...] = (40, 41, 42), **fields: object) -> GenerationRequest:
    return GenerationRequest(list(prompt), max_tokens, Sampling(seed=seed), **fields)  # type: ignore[arg-type]


def blocks_of(engine: SerialEngine, request: GenerationRequest) -> tuple[list[int], Reply]:
    """(tokens of each step, the reply)."""
    engine.start(ONE, request)
    replies, sizes = {ONE: Reply()}, []
    while engine.busy:
        steps = engine.step()
        sizes.append(sum(isinstance(step, Committed) for step in steps))
        collect(replies, steps)
    return sizes, replies[ONE]


def test_a_block_is_a_canvas_and_max_tokens_may_end_within_one(engine: SerialEngine) -> None:
    assert (engine.facts.block, engine.facts.lanes, engine.facts.slots) == (CANVAS, ("serial",), 1)
    for most, sizes in ((40, [16, 16, 8, 0]), (32, [16, 16, 0]), (5, [5, 0]), (1, [1, 0])):
        found, reply = blocks_of(engine, ask(most))
        assert (found, reply.reason) == (sizes, "length")
        assert reply.text and reply.text == engine._texts.tokenizer.decode(reply.tokens)


def test_a_stop_id_ends_the_reply_and_throws_the_rest_of_its_block_away(engine: SerialEngine) -> None:
    whole = blocks_of(engine, ask())[1]
    for place in (0, 7, 15, 16, 17, 31):
        stop = whole.texts[place]
        first = whole.texts.index(stop)
        sizes, reply = blocks_of(engine, ask(stop=[stop]))
        assert (reply.texts[:-1], reply.reason) == (whole.texts[:first], "stop"), place
        assert sizes == [CANVAS] * (first // CANVAS) + [first % CANVAS, 0]


def test_an_end_of_sequence_is_neither_counted_nor_written(engine: SerialEngine, tmp_path: Path) -> None:
    from fixtures.tiny_diffusion import build

    whole = blocks_of(engine, ask())[1]
    word = engine._texts.piece(whole.tokens[20])
    ended = blocks_of(loaded(build(tmp_path / "ends", eos=[word])), ask())[1]
    assert (ended.tokens, ended.reason) == (whole.tokens[: whole.tokens.index(whole.tokens[20])], "stop")


def test_skipped_tokens_count_and_are_not_written(engine: SerialEngine) -> None:
    generator = engine._generator
    assert generator is not None

    def said(skip: set[int]) -> list[tuple[int, str]]:
        return [token for block in generator.generate([40, 41], 20, (), skip, 1) for token in block.tokens]

    whole = said(set())
    skipped = said({whole[3][0]})
    assert [token for token, _ in skipped] == [token for token, _ in whole] and len(skipped) == 20
    assert all((text == "") == (token == whole[3][0]) for token, text in skipped)


def test_the_same_prompt_and_seed_give_the_same_reply(engine: SerialEngine) -> None:
    first, again = (blocks_of(engine, ask())[1] for _ in range(2))
    other, choice, free, freer = (
        blocks_of(engine, ask(**fields))[1]  # type: ignore[arg-type]
        for fields in ({"seed": 6}, {"choice": 1}, {"seed": None}, {"seed": None})
    )
    assert first.tokens == again.tokens
    assert len({tuple(reply.tokens) for reply in (first, other, choice, free, freer)}) == 5


def test_seeded_replies_leave_everybody_elses_random_numbers_alone(engine: SerialEngine) -> None:
    alone = blocks_of(engine, ask())[1].tokens

    def draw() -> list[float]:
        # What another reply draws between two blocks.
        return mx.random.uniform(shape=(3,)).tolist()

    mx.random.seed(1)
    engine.start(ONE, ask())
    replies, drawn = {ONE: Reply()}, []
    while engine.busy:
        collect(replies, engine.step())
        drawn.append(draw())
    assert replies[ONE].tokens == alone
    mx.random.seed(1)
    assert drawn == [draw() for _ in drawn]


def test_a_cancel_between_blocks_ends_it_and_the_next_reply_is_as_ever(engine: SerialEngine) -> None:
    before = blocks_of(engine, ask())[1].tokens
    engine.start(ONE, ask(200))
    engine.start(TWO, ask())
    engine.step()
    engine.cancel(ONE)
    replies = {TWO: Reply()}
    while engine.busy:
        collect(replies, engine.step())
    assert replies[TWO].tokens == before


def test_settings_of_denoising_count(tiny_diffusion_model: Path, engine: SerialEngine) -> None:
    one_step = loaded(tiny_diffusion_model, denoising=Denoising(steps=1))
    small = loaded(tiny_diffusion_model, denoising=Denoising(canvas=8))
    entropy = loaded(tiny_diffusion_model, denoising=Denoising(sampler=diffusion.ENTROPY))
    eager = loaded(tiny_diffusion_model, denoising=Denoising(threshold=0.0))
    usual = blocks_of(engine, ask())[1].tokens
    assert blocks_of(small, ask(20))[0] == [8, 8, 4, 0]
    found = {tuple(blocks_of(one, ask())[1].tokens) for one in (one_step, entropy, eager)}
    assert tuple(usual) not in found and len(found) >= 2


def test_the_worker_chooses_it_by_the_models_type(tiny_diffusion_model: Path, tiny_model: Path) -> None:
    chosen = WorkerSettings(slots=1, diffusion_canvas=8)
    made = engines.make(chosen, ModelChoice("d", str(tiny_diffusion_model)))
    assert isinstance(made, SerialEngine)
    made.load(lambda words: None)
    assert made.facts.block == 8 and made.facts.details["weights"] in ("float32", "keep")
    assert not isinstance(engines.make(chosen, ModelChoice("t", str(tiny_model))), SerialEngine)


def test_without_the_extra_one_line_says_what_to_install(tiny_diffusion_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(ConfigError, match=r"needs the extra diffusion: .* -m pip install -e '\.\[diffusion\]'$") as caught:
        loaded(tiny_diffusion_model)
    assert "\n" not in str(caught.value)


def test_a_damaged_model_is_said_in_one_line(tmp_path: Path) -> None:
    from fixtures.tiny_diffusion import build

    folder = build(tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 32'))
    with pytest.raises(ConfigError, match="^mlx-vlm cannot load .*") as caught:
        loaded(folder)
    assert "\n" not in str(caught.value)


def test_mlx_vlm_is_the_version_this_was_written_for() -> None:
    pinned = re.search(r"mlx-vlm ==(\S+)", (Path(__file__).parents[2] / "setup.cfg").read_text())
    assert pinned and version("mlx-vlm") == pinned[1] == diffusion.VERSION


def test_mlx_vlms_generator_takes_what_it_is_given() -> None:
    from mlx_vlm.generate.diffusion import stream_diffusion_generate
    from mlx_vlm.tokenizer_utils import make_streaming_detokenizer

    taken = list(inspect.signature(stream_diffusion_generate).parameters)
    assert taken[:6] == ["model", "processor", "tokenizer", "input_ids", "pixel_values", "attention_mask"]
    assert {
        "max_tokens", "skip_special_token_ids", "max_denoising_steps", "diffusion_max_canvas_length", "diffusion_sampler",
        "diffusion_threshold", "prefill_step_size",
    } <= set(taken)  # fmt: skip
    # A copy of the detokenizer, reset: so replies share none.
    assert "copy(processor.detokenizer)" in inspect.getsource(make_streaming_detokenizer)


def test_two_replies_do_not_share_a_decoder(tiny_diffusion_model: Path) -> None:
    texts = Texts(tiny_diffusion_model)
    from mlx_vlm.tokenizer_utils import make_streaming_detokenizer

    processor = diffusion._Decoder(texts).as_processor()
    one, other = make_streaming_detokenizer(processor), make_streaming_detokenizer(processor)
    smile = texts.tokenizer.encode("🙂", add_special_tokens=False).ids
    halves = [texts.tokenizer.token_to_id(letter) for letter in ("Ã", "©")]
    one.add_token(halves[0])
    other.add_token(smile[0])
    one.add_token(halves[1])
    assert (one.last_segment, other.last_segment) == ("é", "🙂")


def test_reply_ends_are_told_once(engine: SerialEngine) -> None:
    engine.start(ONE, ask(3))
    ends = []
    while engine.busy:
        ends += [step for step in engine.step() if isinstance(step, Ended)]
    assert len(ends) == 1
    assert run(engine, {ONE: ask(3), TWO: ask(3)})[TWO].reason == "length"
