"""tools/plot.py and mkd.report.run_log: the curves are the numbers in the file; an invalid file is a one-line error."""

import importlib
import json
import math
import os
from pathlib import Path

import pytest

from mkd.errors import MkdDataError
from mkd.report.run_log import RunLog

TOOL = Path(__file__).resolve().parents[3] / "tools" / "plot.py"


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("mkd.cli.plot")


def write_run(path: Path, *, kd: bool = True, steps: int = 7) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"event": "start", "note": "no iteration here"},
        {"iteration": 0, "valid_ce": 9.0, "valid_teacher_ce": 2.5},
    ]
    for i in range(1, steps + 1):
        lines.append({"iteration": i, "loss": 8.0 / i, "ce": 9.0 / i, "lr": 0.1, "skipped": False})
        if kd:
            lines[-1]["kd"] = 7.0 / i
    lines.append({"iteration": steps, "valid_ce": 3.0, "valid_teacher_ce": 2.5})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def titled(figure) -> dict:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def test_curves_hold_the_numbers_of_the_files(tool, tmp_path):
    runs = [RunLog.read(write_run(tmp_path / "a.jsonl")), RunLog.read(write_run(tmp_path / "b.jsonl", kd=False))]
    figure = tool.draw(runs, ["with", "without"])
    axes = titled(figure)
    assert list(axes) == [tool.PANELS[name] for name in ("loss", "ce", "kd", "valid_ce")]
    (line,) = axes["KD divergence, training"].get_lines()
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6, 7]
    assert line.get_ydata() == pytest.approx([7.0 / i for i in range(1, 8)])
    assert len(axes["Cross-entropy, training"].get_lines()) == 2
    first, second, teacher = axes["Cross-entropy, validation"].get_lines()
    assert list(first.get_xdata()) == list(second.get_xdata()) == [0, 7]
    assert list(first.get_ydata()) == [9.0, 3.0]
    assert list(teacher.get_ydata()) == [2.5, 2.5]


def run_of(folder: Path, *, ratio: float, temperature: float, loss: str, teacher_ce: float = 2.5) -> RunLog:
    folder.mkdir()
    kd = {"loss": loss, "beta": 0.3, "skew": 0.1, "xtoken_loss": None, "temperature_squared": True}
    (folder / "kd_config.json").write_text(json.dumps({"kd": kd}))
    step = {"loss": 4.0, "ce": 4.0, "kd": 4.0, "ratio": ratio, "temperature": temperature, "peak_memory_gib": 2.0}
    lines = [{"iteration": i, **step} for i in (1, 2)] + [
        {"iteration": 2, "valid_ce": 3, "valid_teacher_ce": teacher_ce}
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunLog.read(str(folder / "metrics.jsonl"))


def legend_of(axes) -> list[str]:
    return [] if axes.get_legend() is None else [text.get_text() for text in axes.get_legend().get_texts()]


def test_legend_names_objectives_that_differ(tool, tmp_path):
    a = run_of(tmp_path / "a", ratio=0.9, temperature=1.0, loss="forward_kl")
    b = run_of(tmp_path / "b", ratio=0.9, temperature=2.0, loss="jsd")
    c = run_of(tmp_path / "c", ratio=0.0, temperature=1.0, loss="forward_kl")
    said = ["a: R = 0.9, forward_kl, T = 1", "b: R = 0.9, jsd (beta 0.3), T = 2", "c: R = 0"]
    axes = titled(tool.draw([a, b, c], ["a", "b", "c"]))
    assert legend_of(axes[tool.PANELS["loss"]]) == legend_of(axes[tool.PANELS["kd"]]) == said
    assert legend_of(axes[tool.PANELS["ce"]]) == []
    assert legend_of(titled(tool.draw([a, a], ["a", "again"]))[tool.PANELS["loss"]]) == []


def test_each_teacher_has_one_legend_entry(tool, tmp_path):
    runs = [
        run_of(tmp_path / name, ratio=0.9, temperature=1.0, loss="tvd", teacher_ce=ce)
        for name, ce in (("a", 2.5), ("b", 2.50001), ("c", 2.51))
    ]
    same = titled(tool.draw(runs[:2], ["a", "b"]))[tool.PANELS["valid_ce"]]
    assert legend_of(same) == ["a: 3.000", "b: 3.000", "teacher: 2.500"]
    other = titled(tool.draw(runs[1:], ["b", "c"]))[tool.PANELS["valid_ce"]]
    assert legend_of(other)[2:] == ["teacher of b: 2.500", "teacher of c: 2.510"]
    assert not other.texts


def test_axes_have_whole_iterations_and_room_above(tool, tmp_path):
    run = run_of(tmp_path / "a", ratio=0.9, temperature=1.0, loss="tvd")
    figure = tool.draw([run], ["a"])
    figure.canvas.draw()
    axes = titled(figure)
    ticks = [[float(tick) for tick in panel.get_xticks()] for panel in axes.values()]
    assert all(each == ticks[0] and all(tick == int(tick) for tick in each) for each in ticks)
    assert axes[tool.PANELS["peak_memory_gib"]].get_ylim() == pytest.approx((0.0, 2.2))


def test_panels_and_smoothing_can_be_chosen(tool, tmp_path):
    run = RunLog.read(write_run(tmp_path / "a.jsonl"))
    figure = tool.draw([run], ["only"], ["lr", "ce", "valid_teacher_ce"], window=2)
    axes = titled(figure)
    assert list(axes) == ["Learning rate", tool.PANELS["ce"], "valid_teacher_ce"]
    assert [panel.get_ylabel() for panel in axes.values()] == ["", "nats per token", "nats per token"]
    raw, smoothed = axes[tool.PANELS["ce"]].get_lines()
    assert list(raw.get_ydata())[:2] == [9.0, 4.5]
    assert list(smoothed.get_ydata())[:2] == pytest.approx([9.0, (9.0 + 4.5 + 3.0) / 3])


def test_panels_without_values_are_omitted(tool, tmp_path):
    figure = tool.draw([RunLog.read(write_run(tmp_path / "a.jsonl", kd=False))], ["only"])
    assert tool.PANELS["kd"] not in titled(figure)
    assert len(titled(figure)) == 3


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_suffix_chooses_the_format(tool, tmp_path, suffix, start, capsys):
    files = [write_run(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    out = tmp_path / "pictures" / f"loss{suffix}"
    assert tool.main([*files, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)
    assert capsys.readouterr().out.strip() == str(out)


def test_smoothing_does_not_lag_and_skips_nan(tool):
    assert tool.smooth([1.0, 3.0, 5.0, 7.0], 2) == pytest.approx([1.0, 3.0, 5.0, 7.0])
    assert tool.smooth([math.nan, 2.0, math.nan, 4.0], 2) == pytest.approx([2.0, 2.0, 3.0, 4.0])


def test_the_last_line_of_an_iteration_is_used(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "loss": 5}\n{"iteration": 2, "loss": 4}\n{"iteration": 1, "loss": 3}\n')
    run = RunLog.read(str(path))
    assert run.curve("loss") == ([1, 2], [3.0, 4.0])
    assert (run.first("loss"), run.last("loss"), run.last("kd")) == (3.0, 4.0, None)


def test_incomplete_last_line_is_ignored_with_a_message(tool, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "loss": 5}\n{"iteration": 2, "lo')
    run = RunLog.read(str(path))
    assert run.torn and run.curve("loss") == ([1], [5.0])
    assert tool.main([str(path), "--out", str(tmp_path / "a.png")]) == 0
    assert "last line is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "holds no iteration yet"),
        ('{"event": "start"}\n', "holds no iteration yet"),
        (
            '{"messages": [], "id": 1}\n',
            "is not a metrics file: no line has an iteration (keys there: messages, id)",
        ),
        ("mkd: iteration 1\n", "; give the --kd-metrics-file of a run"),
        ('{"iteration": 1, "loss": 5}\n{"iter\n{"iteration": 2, "loss": 5}\n', "line 2: broken JSON"),
        ('{"iteration": 1, "loss": 5}\n7\n', "line 2: not a JSON object"),
        ('{"iteration": 1, "color": 5}\n', "is not a metrics file"),
        (f'{{"iteration": 1{"0" * 400}, "loss": 5}}\n', "line 1: the iteration is larger than 2^52"),
    ],
)
def test_invalid_files_are_one_line_errors(tool, tmp_path, capsys, content, message):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    assert tool.main([str(path), "--out", str(tmp_path / "a.png")]) == 1
    error = capsys.readouterr().err
    assert message in error and str(path) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


def test_invalid_flags(tool, tmp_path, capsys):
    path = write_run(tmp_path / "metrics.jsonl")
    assert tool.main([path, "--out", str(tmp_path / "a.txt")]) == 1
    assert "must end in" in capsys.readouterr().err
    assert tool.main([path, "--out", str(tmp_path / "a.png"), "--labels", "a", "b"]) == 1
    assert "2 names for 1 files" in capsys.readouterr().err
    assert tool.main([path, "--out", str(tmp_path / "a.png"), "--smooth", "0"]) == 1
    assert "--smooth is 0" in capsys.readouterr().err
    with pytest.raises(MkdDataError, match=r"is a folder; give the file in it, metrics.jsonl in a --save folder"):
        RunLog.read(str(tmp_path))


def test_a_run_may_be_given_by_its_folder(tool, tmp_path, capsys):
    write_run(tmp_path / "a" / "metrics.jsonl")
    assert tool.main([str(tmp_path / "a"), "--out", str(tmp_path / "a.png")]) == 0
    assert tool.main([str(tmp_path), "--out", str(tmp_path / "b.png")]) == 1
    assert f"metrics file {tmp_path / 'metrics.jsonl'} does not exist" in capsys.readouterr().err


def test_a_pipe_is_not_replaced(tool, tmp_path, capsys):
    os.mkfifo(tmp_path / "out.png")
    assert tool.main([write_run(tmp_path / "a" / "m.jsonl"), "--out", str(tmp_path / "out.png")]) == 1
    assert f"--out {tmp_path}/out.png is a named pipe" in capsys.readouterr().err
    assert (tmp_path / "out.png").is_fifo()


def test_names_are_no_formulas(tool, tmp_path):
    file = write_run(tmp_path / "a" / "m.jsonl")
    tool.plot([file], ["$\\nothing$"], str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_a_metrics_file_of_a_terabyte(tmp_path):
    with open(tmp_path / "m.jsonl", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(MkdDataError, match="at most 536,870,912 are read"):
        RunLog.read(str(tmp_path / "m.jsonl"))
