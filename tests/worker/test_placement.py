"""What a request needs and which lane serves it: refused by name, never served without."""

import json

import pytest

from common.errors import ProtocolError
from common.generation import GenerationRequest, Sampling
from worker.engine import EngineFacts, Markup, Unsupported
from worker.placement import Lane, Plan, PlanUsed, lane_that_ran, lanes_of, place, plan, shape_of

TOOL = {"type": "function", "function": {"name": "f"}}


def tools(choice: str = "auto", named: bool = False) -> str:
    return json.dumps({"tools": [TOOL], "choice": choice, "named": named, "parallel": True})


def request(max_tokens: int = 10, prompt: int = 3, **fields: object) -> GenerationRequest:
    return GenerationRequest([1] * prompt, max_tokens, **fields)  # type: ignore[arg-type]


def facts(*abilities: str, lanes: tuple[str, ...] = ("batched",), markup: Markup | None = None) -> EngineFacts:
    return EngineFacts(4, 1000, 1, 100, lanes, abilities, markup=markup)


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, ()),
        ({"stop": ["x"], "thinking": True, "reasoning_open": True, "raw": True, "tools": "[]"}, ()),
        ({"sampling": Sampling(1.0, 1.0, 0, 0.0, None, 1.0, 0.0, 0.0, {})}, ()),
        ({"sampling": Sampling(temperature=0.0, seed=5)}, ("sampling",)),
        ({"sampling": Sampling(top_k=5, seed=0)}, ("sampling", "seed")),
        ({"sampling": Sampling(repetition_penalty=1.1)}, ("penalties",)),
        ({"sampling": Sampling(presence_penalty=-0.1)}, ("penalties",)),
        ({"sampling": Sampling(frequency_penalty=0.1)}, ("penalties",)),
        ({"sampling": Sampling(logit_bias={5: 0.0})}, ()),
        ({"sampling": Sampling(logit_bias={5: 1.0})}, ("logit_bias",)),
        ({"top_logprobs": 0}, ("logprobs",)),
        ({"grammar": "{}"}, ("grammar",)),
        ({"tools": tools()}, ("tools",)),
        ({"tools": tools("required")}, ("tools", "tool_choice")),
        ({"tools": tools("f", named=True)}, ("tools", "tool_choice")),
        ({"tools": tools("required"), "grammar": "lark:x"}, ("grammar", "tools", "tool_choice")),
    ],
)
def test_a_shape_holds_what_is_needed_and_nothing_neutral(fields: dict[str, object], needs: tuple[str, ...]) -> None:
    shape = shape_of(request(**fields))
    assert shape.needs == needs and (shape.prompt_tokens, shape.max_tokens) == (3, 10)


def test_the_first_lane_that_can_and_may_is_taken_and_each_says_why() -> None:
    lanes = [Lane("serial+spec", frozenset({"sampling"}), alone=True), Lane("batched", frozenset({"sampling", "seed"}))]
    plain, seeded = shape_of(request()), shape_of(request(sampling=Sampling(seed=1)))
    assert place(plain, lanes, busy=False) == ("serial+spec", ("serial+spec: taken",))
    assert place(plain, lanes, busy=True) == ("batched", ("serial+spec: busy", "batched: taken"))
    assert place(seeded, lanes, busy=False) == ("batched", ("serial+spec: lacks seed", "batched: taken"))
    assert place(plain, lanes[:1], busy=True) == ("serial+spec", ("serial+spec: busy",))


def test_a_need_that_no_lane_serves_is_refused_by_name() -> None:
    lanes = [Lane("serial", frozenset()), Lane("batched", frozenset({"logprobs"}))]
    with pytest.raises(Unsupported, match=r"^grammar: serial: lacks logprobs, grammar; batched: lacks grammar$"):
        place(shape_of(request(grammar="{}", top_logprobs=2)), lanes, busy=False)
    with pytest.raises(Unsupported, match="^lane: "):
        place(shape_of(request()), [], busy=False)


def test_tools_need_a_parser_and_a_forced_call_something_that_forces_it() -> None:
    parses = Markup(tool_start="[", parse=json.loads)  # type: ignore[arg-type]
    for markup, asked, need in (
        (None, tools(), "tools"),
        (Markup("<t>", "</t>"), tools(), "tools"),
        (parses, tools("required"), "tool_choice"),
    ):
        with pytest.raises(Unsupported, match=f"^{need}: "):
            plan(request(tools=asked), facts("tools", "grammar", markup=markup), busy=False)
    assert plan(request(tools=tools()), facts(markup=parses), busy=False).lane == "batched"
    assert plan(request(tools=tools("required")), facts("tool_choice", markup=parses), busy=False).lane == "batched"


def test_only_speculation_wants_to_be_alone() -> None:
    assert [(lane.name, lane.alone) for lane in lanes_of(facts(lanes=("serial+spec", "serial")))] == [
        ("serial+spec", True), ("serial", False),
    ]  # fmt: skip


def test_a_lane_may_have_abilities_of_its_own() -> None:
    parses = Markup(tool_start="[", parse=json.loads)  # type: ignore[arg-type]
    known = EngineFacts(
        4, 1000, 1, 100, ("serial+spec", "batched"), ("sampling", "seed"), markup=parses,
        lane_abilities={"serial+spec": ("sampling",)},
    )  # fmt: skip
    assert [sorted(lane.abilities) for lane in lanes_of(known)] == [["sampling", "tools"], ["sampling", "seed", "tools"]]


def test_max_tokens_is_bounded_by_the_room_in_the_context() -> None:
    assert plan(request(10, prompt=90), facts(), busy=False).request.max_tokens == 10
    assert plan(request(99, prompt=90), facts(), busy=False).request.max_tokens == 10
    with pytest.raises(Unsupported, match="^prompt: "):
        plan(request(1, prompt=100), facts(), busy=False)


def test_a_plan_begins_once_and_is_released_once() -> None:
    one = Plan(request(), shape_of(request()), "batched", ())
    assert not one.release()
    assert one.begin() == request()
    with pytest.raises(PlanUsed):
        one.begin()
    assert one.release()
    assert not one.release()
    with pytest.raises(PlanUsed):
        one.begin()
    assert not one.release()


def test_a_request_that_contradicts_itself_gets_no_plan() -> None:
    with pytest.raises(ProtocolError):
        plan(request(tools="{"), facts(), busy=False)


def test_a_lane_that_drafted_nothing_ran_plain() -> None:
    assert lane_that_ran("serial+spec", 0, 0) == "serial"
    assert lane_that_ran("serial+spec", 0, 2) == lane_that_ran("serial+spec", 3, 0) == "serial+spec"
    assert lane_that_ran("batched", 0, 0) == "batched"
