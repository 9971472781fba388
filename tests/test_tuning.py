"""Schedules: every entry that the tuner tries or a file may hold is right; what was measured is found and used."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from liger_kernel import _env, cli
from liger_kernel.bench.work import BACKWARD, FORWARD
from liger_kernel.ops import _schedules
from liger_kernel.ops._norm_plan import backward_plan
from liger_kernel.ops._schedules import TABLES, Table
from liger_kernel.tuning import clock, command, search
from liger_kernel.tuning.subjects import SUBJECTS

CPU = torch.device("cpu")
CARD = "cpu-4"
BY_NAME = {subject.table.name: subject for subject in SUBJECTS}
plain = pytest.mark.plain


def told_apart(table, entry, n_rows):
    """What of an entry Triton's interpreter notices: it has neither warps nor pipelines."""
    if table.name.startswith("cross_entropy") or "parts" in table.fields:  # threads are an axis
        return entry[:2]
    if table.name.startswith("softmax"):
        rows, _, *loop = entry
        return rows, *loop
    if "per_sm" in table.fields:
        _, share, meta = backward_plan(entry, n_rows, 1, CPU)
        return meta["ROWS"], share
    return entry[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_candidate_is_right(name, device, monkeypatch):
    if not _env.triton_runs_on(device.type):
        pytest.skip("kernels need an accelerator or TRITON_INTERPRET=1")
    # Rows of several pieces, or narrower than a block; more of them than SMs, and no multiple of a tile.
    n_rows = 5 if name.startswith(("cross_entropy", "attn_res")) else 9  # these take long
    width = 600 if name.startswith("cross_entropy") else 40
    if name.endswith("_wide"):
        n_rows, width = 2, 40009
    subject = replace(BY_NAME[name], elements=n_rows * width)
    table, choose, asked = subject.table, subject.table.choose, []
    monkeypatch.setattr(table, "choose", lambda *given: asked.append(choose(*given)) or asked[-1])
    trial = search.Trial(subject, width, torch.float32, device)
    entries = {e for key in table.entries for e in table.candidates(key)}
    for entry in {told_apart(table, e, n_rows): e for e in sorted(entries)}.values():
        with table.using(entry):
            error = trial.check()
        assert asked.pop() == entry, "the op did not ask its table"
        assert error < 4e-6, (entry, error)


# Tables


@plain
def test_built_in_entries_are_candidates():
    assert BY_NAME.keys() == TABLES.keys()
    for table in TABLES.values():
        assert list(table.entries) == sorted(table.entries)
        for key, entry in table.entries.items():
            assert entry in table.candidates(key), (table.name, key)


@pytest.fixture
def table(monkeypatch):
    """A table beside those of the package."""
    monkeypatch.setattr(_schedules, "TABLES", dict(TABLES))
    fields = {"rows": (1, 2, 4), "warps": (1, 4, 8)}
    entries = {64: (4, 1), 256: (1, 4), 1024: (1, 8)}
    return Table("toy.forward", fields, entries, lambda key, rows, warps: rows == 1 or key < 1024)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where schedules are looked for."""
    monkeypatch.setenv("LIGER_KERNEL_SCHEDULES", str(tmp_path))
    _schedules.forget()
    yield tmp_path
    _schedules.forget()


def record(key, itemsize, **schedule):
    return {"table": "toy.forward", "key": key, "bytes": itemsize, "schedule": schedule}


@plain
def test_a_size_takes_the_smallest_key_that_holds_it(table, folder):
    x = torch.empty(0)
    found = {size: table.entry(size, x) for size in (1, 64, 65, 256, 1024, 4096)}
    assert list(found.values()) == [(4, 1), (4, 1), (1, 4), (1, 4), (1, 8), (1, 8)]
    with table.using((2, 8)):
        assert table.entry(64, x) == table.entry(4096, x) == (2, 8)
    assert table.entry(64, x) == (4, 1)


@plain
def test_what_was_measured_on_this_card_comes_first(table, folder, monkeypatch):
    records = [record(256, 2, rows=2, warps=4), record(1024, 4, rows=1, warps=4)]
    _schedules.write(folder / f"{CARD}.json", CARD, records)
    half, single = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    assert [table.entry(size, half) for size in (64, 200, 1024)] == [(4, 1), (2, 4), (1, 8)]
    assert [table.entry(size, single) for size in (64, 200, 1024)] == [(4, 1), (1, 4), (1, 4)]
    monkeypatch.setenv("LIGER_KERNEL_SCHEDULES", "off")
    assert table.entry(200, half) == (2, 4), "read once"
    _schedules.forget()
    assert table.entry(200, half) == (1, 4)


@plain
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a file of schedules in format 1"),
        ('{"format": 2}', "not a file of schedules in format 1"),
        ('{"format": 1, "card": "sm_90-132"}', "measured on sm_90-132, this card is cpu-4"),
        ('{"format": 1, "card": "cpu-4"}', "its schedules are incomplete"),
        ('{"format": 1, "card": "cpu-4", "schedules": [{"table": 1}]}', "are incomplete"),
        (b"\xff", "can't decode byte"),
    ],
)
def test_a_broken_file_is_ignored_with_one_warning(table, folder, content, said):
    path = folder / f"{CARD}.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=f"{path.name} is ignored.*{said}") as warned:
        found = [table.entry(size, torch.empty(0)) for size in (256, 64)]
    assert found == [(1, 4), (4, 1)]
    assert len(warned) == 1


@plain
@pytest.mark.parametrize(
    "schedule",
    [{"rows": 3, "warps": 4}, {"rows": 4, "warps": 8}, {"rows": 1}, {"rows": "1", "warps": [4]}],
)
def test_a_file_cannot_hold_what_the_tuner_would_not_try(table, folder, schedule):
    _schedules.write(folder / f"{CARD}.json", CARD, [record(1024, 4, **schedule)])
    with pytest.warns(UserWarning, match=r"toy.forward has a schedule that this version does not"):
        assert table.entry(1024, torch.empty(0)) == (1, 8)


# Search


@plain
def test_the_search_takes_the_fastest_entry_that_is_right(table):
    times = {(4, 1): 5.0, (1, 1): 1.0, (1, 8): 2.0, (2, 8): 3.0}
    under = lambda: table.entry(64, torch.empty(0))  # noqa: E731

    def check():
        if under() == (1, 1):
            raise ValueError("off by a lot\nmore")

    found = search.search(table, 64, check, lambda: times.get(under(), 9.0))
    assert (found.entry, found.ms, found.built_in_ms) == ((1, 8), 2.0, 5.0)
    assert found.tried == len(table.candidates(64))
    assert found.failed == {(1, 1): "ValueError: off by a lot"}
    narrow = search.search(table, 64, check, lambda: times.get(under(), 9.0), max_warps=4)
    assert (narrow.entry, narrow.tried) == ((4, 1), 6)
    times[4, 1] = 2.01  # within the noise
    assert search.search(table, 64, check, lambda: times.get(under(), 9.0)).entry == (4, 1)
    assert search.search(table, 64, check, lambda: 1.0, deadline=0.0) is None
    with pytest.raises(RuntimeError, match=r"toy.forward at 64: no schedule works; ZeroDivision"):
        search.search(table, 64, lambda: 1 / 0, lambda: 1.0)
    assert table.entry(64, torch.empty(0)) == (4, 1)


# Command


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(_env, "infer_device", lambda: "cpu")


@pytest.fixture
def small(monkeypatch, on_cpu):
    """A CPU that passes for a GPU, small matrices, and a clock that prefers two rows, then few warps."""
    table = TABLES["rms_norm.forward"]

    def prefers_two(works, mode, device):
        assert len(works) > 1
        assert works[0].inputs["x"].data_ptr() != works[1].inputs["x"].data_ptr()

        def ms():
            rows, warps = table.entry(512, works[0].inputs["x"])
            return abs(rows - 2) + warps / 100

        return ms

    monkeypatch.setattr(search, "_ROTATED", 1)
    monkeypatch.setattr(command, "can_run", lambda device: True)
    monkeypatch.setattr(command, "aside", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(command, "Clock", prefers_two)
    monkeypatch.setattr(command, "SUBJECTS", [replace(s, elements=2048) for s in SUBJECTS])
    return table


ARGUMENTS = ["tune", "rms_norm.forward", "--dtype", "fp32", "--widths"]


@plain
def test_what_the_command_finds_is_written_and_used(small, folder, capsys):
    path = folder / f"{CARD}.json"
    assert cli.main([*ARGUMENTS, "512", "1024"]) == 0
    said = capsys.readouterr().out
    assert "rms_norm.forward             4x512  rows=8 warps=4  6.0400 ms -> rows=2 warps=1" in said
    assert "in force from the next process on" in said
    content = json.loads(path.read_text())
    assert content["card"] == CARD
    assert [(r["key"], r["bytes"]) for r in content["schedules"]] == [(512, 4), (1024, 4)]
    assert content["schedules"][0]["versions"]["torch"] == torch.__version__
    assert not list(folder.glob("*.json.*"))
    _schedules.forget()
    assert small.entry(512, torch.empty(0)) == (2, 1)
    assert small.entry(512, torch.empty(0, dtype=torch.float16)) == (8, 4)


@plain
def test_the_command_goes_on_where_it_stopped(small, folder, capsys, monkeypatch):
    assert cli.main([*ARGUMENTS, "512"]) == 0
    tried = []
    monkeypatch.setattr(command, "search", lambda *given: tried.append(given[1]))
    assert cli.main([*ARGUMENTS, "512", "256"]) == 0
    assert tried == [256]
    said = capsys.readouterr().out
    assert "1 of 2 are in" in said
    assert "900 s are over, 1 of 1 keys are left: run it again to go on" in said
    assert cli.main([*ARGUMENTS, "512", "--again"]) == 0
    assert cli.main([*ARGUMENTS, "500"]) == 0, "another width of a key that is known"
    assert tried == [256, 512, 512]
    monkeypatch.setattr(command, "search", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([*ARGUMENTS, "1024"])


@plain
def test_a_key_that_fails_does_not_stop_the_others(small, folder, capsys, monkeypatch):
    def search_or_fail(table, key, *given):
        if key == 512:
            raise RuntimeError("no schedule works")
        return search.search(table, key, *given)

    monkeypatch.setattr(command, "search", search_or_fail)
    assert cli.main([*ARGUMENTS, "512", "1024"]) == 1
    said = capsys.readouterr().out
    assert "4x512  failed: no schedule works" in said
    assert "2x1024  rows=2 warps=2" in said


@plain
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rms_nrom"], "unknown table 'rms_nrom'. Did you mean 'rms_norm'?"),
        (["rms_norm", "--widths", "65536"], "no schedule is looked up for rows of these widths"),
        (["rms_norm"], "cannot add to"),
    ],
)
def test_bad_input_is_one_line(small, folder, capsys, arguments, said):
    (folder / f"{CARD}.json").write_text("{}")
    assert cli.main(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err


@plain
def test_without_a_gpu(folder, capsys, monkeypatch, on_cpu):
    assert cli.main(["tune", "softmax", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "softmax.backward             8192x4096  73 candidates, built in: rows=1 warps=8" in said
    assert str(folder / f"{CARD}.json") in said
    monkeypatch.setattr(command, "can_run", lambda device: False)
    assert cli.main(["tune"]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setenv("LIGER_KERNEL_SCHEDULES", "off")
    assert cli.main(["tune"]) == 2


@pytest.mark.gpu
def test_on_a_gpu(folder, device, capsys):
    if not clock.can_run(device):
        pytest.skip("no graphs of kernels here")
    operands = {"rms_norm.forward": 2, "gated.backward": 5, "cross_entropy.gradient": 2}
    assert cli.main(["tune", *operands, "--widths", "4096"]) == 0
    said = capsys.readouterr().out
    card = _schedules.card_of(device)
    records = _schedules.read(folder / f"{card}.json", card)
    assert {r["table"] for r in records} == operands.keys(), said
    _schedules.forget()  # as the next process, which reads the file
    for found in records:
        moved = 2 * operands[found["table"]] * BY_NAME[found["table"]].elements
        assert found["ms"] > moved / 20e9, f"no card moves 20 TB/s: {said}"
        x = torch.empty(0, dtype=torch.bfloat16, device=device)
        entry = TABLES[found["table"]].entry(found["key"], x)
        assert entry == tuple(found["schedule"].values())


# Clock


class Accelerator:
    """A CPU that captures graphs: `seen` is what was asked of it, each replay takes 3 ms."""

    def __init__(self):
        self.seen, self.now = [], 0.0

    def Stream(self, device):
        return "side"

    def stream(self, stream):
        return contextlib.nullcontext()

    def CUDAGraph(self):
        return SimpleNamespace(
            capture_begin=lambda: self.seen.append("begin"),
            capture_end=lambda: self.seen.append("end"),
            replay=self.replay,
        )

    def empty_cache(self):
        self.seen.append("empty")

    def replay(self):
        self.now += 3.0

    def event(self, device):
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event


@plain
@pytest.mark.parametrize("name", ["gated.forward", "gated.backward", "cross_entropy.gradient"])
def test_the_clock_captures_calls_that_it_has_warmed_up(name, monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setattr(_env, "memory_module", lambda device: accelerator)
    monkeypatch.setattr(_env, "event", accelerator.event)
    monkeypatch.setattr(search, "_ROTATED", 3 * 2 * 24 * 4)
    subject = replace(BY_NAME[name], elements=24)
    trial = search.Trial(subject, 8, torch.float32, CPU)
    works, calls = trial.rotation(), accelerator.seen
    for work in works:
        function = work.function
        work.function = lambda function=function, **inputs: (
            calls.append(torch.is_grad_enabled()) or function(**inputs)
        )
    with clock.aside(CPU):
        assert clock.Clock(works, subject.mode, CPU)() == pytest.approx(3.0 / len(works))
    grad = subject.mode != FORWARD
    before = calls[: calls.index("begin")]
    assert before == [grad] * len(works)
    captured = calls[len(before) + 1 : calls.index("end")]
    assert captured == ([] if subject.mode == BACKWARD else [grad] * len(works))
    assert calls[-2:] == ["end", "empty"]
