"""The ring of recent requests: bounded, and true to what happened."""

from broker.traces import Traces
from tests.broker.test_ledger import API, Book, id_


def test_the_oldest_goes_when_the_room_is_full() -> None:
    traces = Traces(room=3)
    for number in range(10):
        traces.begin(id_(number), "label", "m", 0.0)
    assert len(traces) == 3 and [t["request"] for t in traces.labelled("label")] == [id_(n).hex() for n in (7, 8, 9)]
    assert traces.mark(id_(1), "late", 1.0) is None


def test_a_request_leaves_its_marks_on_its_way() -> None:
    from common.envelope import Done, Reserve, Started, Submit
    from common.outcomes import Outcome

    book = Book()
    ledger = book.ledger
    ledger.reserve(API, Reserve([id_(1)], "label", "m", 0, ""), 1.0)
    ledger.submit(API, Submit(id_(1), 1, 1, b"", ""), b"p", 2.0)
    ledger.started(b"w0", Started(id_(1), 1, "batched", "w0"), 3.0)
    ledger.tokens(b"w0", id_(1), 1, 4.0)
    ledger.tokens(b"w0", id_(1), 1, 5.0)
    ledger.done(b"w0", Done(id_(1), 1, Outcome.STOP), b"summary", 6.0)
    (trace,) = ledger.traces.labelled("label")
    assert trace["marks"] == [
        ["reserved", 1.0],
        ["submitted", 2.0],
        ["dispatched", 2.0],
        ["started", 3.0],
        ["first_tokens", 4.0],
        ["ended", 6.0],
    ]
    assert (trace["workers"], trace["lane"], trace["outcome"]) == (["w0"], "batched", "stop")
    assert trace["worker_payload"] == b"summary"
    histograms = ledger.models["m"].histograms
    assert [sum(histograms[kind].counts) for kind in ("request", "queue_wait", "time_to_first_token")] == [1, 1, 1]
    assert histograms["request"].sum_us == 5_000_000 and histograms["time_to_first_token"].sum_us == 2_000_000
