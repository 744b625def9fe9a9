"""Speculative decoding on tiny llamas: the same tokens as without it, one round a step, and company at once."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from common.errors import ConfigError
from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from tests.worker.driving import Reply, collect, drain, rid, run
from worker import placement
from worker.engine import Committed, Ended, Prefilled, Step
from worker.engines import mlx_lm_0_32, speculative
from worker.engines.batched import BatchedEngine
from worker.engines.text import Texts

pytestmark = [pytest.mark.lanes, pytest.mark.slow]

ONE, TWO = rid(1), rid(2)
GREEDY = Sampling(temperature=0.0)
CONTEXT = 600


def loaded(folder: Path, draft: Path | None = None, **options: object) -> BatchedEngine:
    engine = BatchedEngine(folder, slots=4, context=CONTEXT, draft=draft, **options)  # type: ignore[arg-type]
    engine.load(lambda words: None)
    return engine


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """Draft models: the model itself, one that knows nothing of it, one that is right now and then, one that knows more
    tokens."""
    from fixtures.tiny_model import build

    folder = tmp_path_factory.mktemp("drafts")
    other = build(folder / "other", seed=1)
    near = build(folder / "near")
    weights = mx.load(str(near / "model.safetensors"))
    mx.random.seed(3)
    mx.save_safetensors(
        str(near / "model.safetensors"),
        {name: weight + 0.006 * mx.random.normal(weight.shape) for name, weight in weights.items()},
        {"format": "mlx"},
    )
    more = build(folder / "more", extra_tokens=("<one more>", "<and another>"))
    return {"copy": tiny_model, "other": other, "near": near, "more": more}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> BatchedEngine:
    return loaded(tiny_model)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, drafts: dict[str, Path]) -> BatchedEngine:
    return loaded(tiny_model, drafts["near"])


@pytest.fixture(autouse=True)
def idle(engine: BatchedEngine) -> Iterator[None]:
    yield
    engine.rebuild()


def ask(number: int = 0, max_tokens: int = 40, sampling: Sampling = GREEDY, length: int = 20, **fields: object) -> GenerationRequest:
    prompt = [5 + (number * 37 + place * place) % 300 for place in range(length)]
    return GenerationRequest(prompt, max_tokens, sampling, **fields)  # type: ignore[arg-type]


def steps_of(engine: BatchedEngine, request: GenerationRequest) -> list[list[Step]]:
    engine.start(ONE, request)
    found = []
    while engine.busy:
        found.append(engine.step())
    return found


def ended(steps: list[list[Step]]) -> Ended:
    (end,) = [one for step in steps for one in step if isinstance(one, Ended)]
    return end


@pytest.mark.parametrize("name", ["copy", "other", "near", "more"])
def test_greedy_replies_are_those_of_the_model_alone(
    tiny_model: Path, plain: BatchedEngine, drafts: dict[str, Path], name: str
) -> None:
    engine = loaded(tiny_model, drafts[name], draft_tokens=4)
    assert engine.facts.lanes == ("serial+spec", "batched")
    accepted = rejected = 0
    for number in range(3):
        for most in (1, 2, 7, 40):
            request = ask(number, most, length=1 + 23 * number)
            assert engine.lane_for(request) == "serial+spec"
            wanted = run(plain, {ONE: request})[ONE]
            steps = steps_of(engine, request)
            replies = {ONE: Reply()}
            for step in steps:
                collect(replies, step)
            assert (replies[ONE].tokens, replies[ONE].text, replies[ONE].reason) == (wanted.tokens, wanted.text, "length")
            committed = [one for step in steps for one in step if isinstance(one, Committed)]
            assert ended(steps).accepted_draft_tokens == sum(one.from_draft for one in committed)
            assert ended(steps).rejected_draft_tokens == sum(one.rejected_drafts for one in committed)
            accepted += ended(steps).accepted_draft_tokens
            rejected += ended(steps).rejected_draft_tokens
    share = accepted / (accepted + rejected)
    assert {"copy": share >= 0.9, "more": share < 0.2, "other": share < 0.2, "near": 0.2 < share < 0.9}[name], share


def test_a_step_is_a_round(engine: BatchedEngine) -> None:
    sizes = [sum(isinstance(one, Committed) for one in step) for step in steps_of(engine, ask(max_tokens=60))]
    assert max(sizes) == 4 and sizes[0] == 0 and sum(sizes) == 60


def test_the_models_own_end_and_stop_ids_end_it_within_a_round(tiny_model: Path, engine: BatchedEngine) -> None:
    tokens = [one.token for step in steps_of(engine, ask()) for one in step if isinstance(one, Committed)]
    for place in range(1, 9):
        lane = engine._speculation
        assert lane is not None
        usual, lane._stop_ids = lane._stop_ids, frozenset({tokens[place]})
        try:
            steps = steps_of(engine, ask())
        finally:
            lane._stop_ids = usual
        first = tokens.index(tokens[place])
        assert [one.token for step in steps for one in step if isinstance(one, Committed)] == tokens[:first]
        assert ended(steps).reason == "stop"


def test_a_second_request_joins_at_once_and_neither_changes_the_others_tokens(
    engine: BatchedEngine, plain: BatchedEngine
) -> None:
    first, second = ask(1, 60), ask(2, 8)
    wanted = [run(plain, {ONE: request})[ONE].tokens for request in (first, second)]
    engine.start(ONE, first)
    replies = {ONE: Reply(), TWO: Reply()}
    for _ in range(3):
        collect(replies, engine.step())
    assert placement.plan(second, engine.facts, True).reasons == ("serial+spec: busy", "batched: taken")
    assert engine.lane_for(second) == "batched"
    engine.start(TWO, second)
    while not replies[TWO].reason:
        collect(replies, engine.step())
    assert not replies[ONE].reason, "it waited for the first to end"
    drain(engine, replies)
    assert [replies[id].tokens for id in (ONE, TWO)] == wanted


def test_what_it_cannot_honour_runs_batched_and_says_why(engine: BatchedEngine) -> None:
    for fields, lacking in (
        ({"sampling": Sampling(seed=1)}, "seed"),
        ({"sampling": Sampling(temperature=0.0, presence_penalty=1.0)}, "penalties"),
        ({"sampling": Sampling(temperature=0.0, logit_bias={3: 1.0})}, "logit_bias"),
        ({"top_logprobs": 0}, "logprobs"),
        ({"grammar": '{"type":"object"}'}, "grammar"),
    ):
        request = ask(**fields)  # type: ignore[arg-type]
        plan = placement.plan(request, engine.facts, False)
        assert (plan.lane, engine.lane_for(request)) == ("batched", "batched")
        assert plan.reasons[0] == f"serial+spec: lacks {lacking}"
    assert engine.lane_for(ask(sampling=Sampling(temperature=0.7, top_p=0.9))) == "serial+spec"


def test_a_reply_longer_than_the_drafts_context_runs_batched(tiny_model: Path, tmp_path: Path) -> None:
    from fixtures.tiny_model import build

    engine = loaded(tiny_model, build(tmp_path / "short", context=50))
    assert engine.lane_for(ask(max_tokens=30)) == "serial+spec"
    assert engine.lane_for(ask(max_tokens=31)) == "batched"


def test_sampled_replies_are_drawn_by_the_model(engine: BatchedEngine) -> None:
    warm = Sampling(temperature=1.0)
    for sampling in (warm, Sampling(temperature=1.0, top_p=0.5), Sampling(temperature=0.5, top_k=5, min_p=0.1)):
        reply = run(engine, {ONE: ask(sampling=sampling)})[ONE]
        assert (len(reply.tokens), reply.reason) == (40, "length")
    assert run(engine, {ONE: ask(sampling=warm)})[ONE].tokens != run(engine, {ONE: ask(sampling=warm)})[ONE].tokens
    coldest = Sampling(temperature=1.0, top_k=1)
    assert run(engine, {ONE: ask(sampling=coldest)})[ONE].tokens == run(engine, {ONE: ask()})[ONE].tokens


@pytest.mark.parametrize("after", range(5))
def test_a_cancel_at_any_step_leaves_the_next_reply_as_it_is(
    engine: BatchedEngine, plain: BatchedEngine, after: int
) -> None:
    request = ask(3, 30)
    wanted = run(plain, {ONE: request})[ONE].tokens
    engine.start(ONE, request)
    for _ in range(after):
        engine.step()
    engine.cancel(ONE)
    assert not engine.busy and engine.step() == []
    assert run(engine, {TWO: request})[TWO].tokens == wanted


def test_a_long_prompt_is_read_in_stretches_and_kept_for_the_next(tiny_model: Path, drafts: dict[str, Path]) -> None:
    engine = loaded(tiny_model, drafts["copy"], prefill_step=64)
    request = ask(1, 20, length=400)
    steps = steps_of(engine, request)
    reads = [one for step in steps for one in step if isinstance(one, Prefilled)]
    assert len(reads) >= 6 and (reads[-1].done, reads[-1].total) == (400, 400)
    assert [one.done for one in reads] == sorted(one.done for one in reads)
    again = steps_of(engine, request)
    assert [one.cached for step in again for one in step if isinstance(one, Prefilled)][-1] == 399
    assert [one for step in steps for one in step if isinstance(one, Committed)] == [
        one for step in again for one in step if isinstance(one, Committed)
    ]
    # The batch finds it too.
    engine.start(ONE, ask(1, 5, length=400, top_logprobs=0))
    found = [step for step in engine.step() if isinstance(step, Prefilled)]
    assert found and found[0].cached == 399
    engine.rebuild()


def test_numbers_that_are_not_finite_end_the_reply(tiny_model: Path, engine: BatchedEngine) -> None:
    lane = engine._speculation
    assert lane is not None
    engine.start(ONE, ask())
    engine.step()
    layer = lane._row.cache[0]  # type: ignore[union-attr]
    layer.keys = mx.full(layer.keys.shape, float("nan"))
    (end,) = engine.step()
    assert isinstance(end, Ended) and (end.reason, end.error) == ("failed", "NonFiniteLogits")
    assert not engine.busy


def test_a_draft_of_another_size_reads_and_proposes_only_what_both_know(
    tiny_model: Path, drafts: dict[str, Path]
) -> None:
    small, large = Texts(tiny_model), Texts(drafts["more"])
    sizes = small.tokenizer.get_vocab_size(), large.tokenizer.get_vocab_size()
    lesser = speculative.Draft(tiny_model, large, sizes[1], "keep", lambda words: None)
    past, last = (lesser(mx.array([[token]]), mlx_lm_0_32.new_cache(lesser.model)) for token in (sizes[1] - 1, sizes[0] - 1))
    assert past.shape[-1] == sizes[0] and mx.array_equal(past, last)
    greater = speculative.Draft(drafts["more"], small, sizes[0], "keep", lambda words: None)
    assert greater(mx.array([[5]]), mlx_lm_0_32.new_cache(greater.model)).shape[-1] == sizes[0]


def test_a_draft_of_another_family_is_refused_in_one_line(tiny_model: Path, tiny_sentencepiece_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"has another vocabulary: its token \d+ is .*, the model's ") as caught:
        loaded(tiny_model, tiny_sentencepiece_model)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_cut_back_is_refused(
    tiny_model: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative.mlx_lm_0_32, "can_be_cut", lambda model: False)
    with pytest.raises(ConfigError, match="the cache of the model cannot be cut back"):
        loaded(tiny_model, drafts["copy"])


def test_ids_are_those_of_the_caller(engine: BatchedEngine) -> None:
    engine.start(RequestId(b"x" * 16), ask(max_tokens=2))
    found = {one.request for _ in range(4) for one in engine.step()}
    assert found == {b"x" * 16}
