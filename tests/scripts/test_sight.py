"""What operators look at: status, top, trace and logs, from recorded snapshots and files."""

from pathlib import Path

import pytest

from common.generation import Summary, pack_marks, pack_summary
from scripts import logs_command, status, top, trace_command
from tests.broker.test_switchboard import A, API, WORKER, Board

from common.envelope import Report, Reserve, Submit


def snapshot(board: Board, tokens: int) -> dict:
    board.say(WORKER, Report(1, 0, {"active": 2**30, "budget": 2**31}, {"completion_tokens": tokens}, {}))
    return board.core.snapshot(1.0)


@pytest.fixture
def board() -> Board:
    board = Board()
    board.join(API, WORKER)
    board.say(API, Reserve([A], "label", "m", 0, ""))
    board.say(API, Submit(A, 10, 20, b"", "print"), b"prompt")
    return board


def test_top_fits_80_columns_and_shows_rates_and_memory(board: Board) -> None:
    before = snapshot(board, 100)
    lines = top.screen(before, snapshot(board, 300), 2.0)
    assert all(len(line) <= 80 for line in lines), lines
    (row,) = (line for line in lines if line.startswith("worker  "[:6]) and "ready" in line)
    assert " 100 " in row and "1/2" in row and "1.00 GiB######......" in row


def test_top_shows_no_rate_across_a_restart_of_the_broker_or_the_worker(board: Board) -> None:
    before, now = snapshot(board, 100), snapshot(board, 300)
    for change in ({"epoch": "another"}, {"workers": [dict(before["workers"][0], pid=99)]}):
        row = next(line for line in top.screen(before | change, now, 1.0) if "ready" in line)
        assert " - " in row


def test_status_says_who_runs_what(board: Board) -> None:
    text = status.table(snapshot(board, 1))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "running 1/2" in text and "worker" in text and "1/2" in text


def test_a_trace_is_one_line_of_time_over_three_processes() -> None:
    trace = {
        "label": "r1",
        "model": "m",
        "lane": "batched",
        "workers": ["m-0", "m-1"],
        "outcome": "stop",
        "marks": [["reserved", 10.0], ["ended", 10.5]],
        "api_payload": pack_marks([("parsed", 9.9), ("last write", 10.6)]),
        "worker_payload": pack_summary(Summary(marks=[("first token", 10.2)])),
    }
    lines = trace_command.told(trace)
    assert "m-0 then m-1" in lines[0]
    assert [line.split(maxsplit=3)[3] for line in lines[2:]] == ["parsed", "reserved", "first token", "ended", "last write"]
    assert lines[4].split()[:2] == ["300.0", "+200.0"]


def test_logs_of_all_processes_in_order_of_time_with_their_tracebacks() -> None:
    broker = ["2026-11-29 10:00:00.100 broker   info  one", "2026-11-29 10:00:02.000 broker   info  four"]
    worker = ["2026-11-29 10:00:01.000 m-0      error two", "Traceback", "  File", "2026-11-29 10:00:01.500 m-0 info three"]
    texts = [text for _, text in logs_command.merged([broker, worker])]
    assert [text.split()[-1] for text in texts] == ["one", "File", "three", "four"]
    assert texts[1].count("\n") == 2


def test_json_logs_are_ordered_too() -> None:
    lines = ['{"at": 1764443069.5, "event": "b"}', '{"at": 1764443069.25, "event": "a"}']
    assert [text for _, text in logs_command.merged([[line] for line in lines])] == lines[::-1]


def test_following_gives_each_line_once_also_across_a_rotation(tmp_path: Path) -> None:
    file = tmp_path / "broker.log"
    file.write_text("2026-11-29 10:00:00.000 one\n2026-11-29 10:00:01.000 tw")
    tails = logs_command.Tails(tmp_path)
    assert [text for _, text in tails.new()] == ["2026-11-29 10:00:00.000 one"]
    with file.open("a") as more:
        more.write("o\n")
    file.rename(tmp_path / "broker.log.1")
    file.write_text("2026-11-29 10:00:02.000 three\n")
    assert [text.split()[-1] for _, text in tails.new()] == ["two", "three"]
    assert tails.new() == []
