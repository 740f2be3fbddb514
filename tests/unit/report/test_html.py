"""The HTML report: its numbers are those of the files, it needs no network, and it escapes everything."""

import base64
import hashlib
import json
import math
import os
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mkd.errors import MkdConfigError, MkdDataError
from mkd.report.html import charts, run_folder
from mkd.report.html.content import content_of, results_of
from mkd.report.html.environment import environment_of
from mkd.report.html.page import render, write_report
from mkd.report.html.run_folder import RunFolder, calibration_of
from mkd.report.run_log import RunLog

NOW = datetime(2026, 1, 2, 3, 4)
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "<!--<script>",
    "javascript:alert(1)",
    "\u202eevil\u0000\x1b[31m",
    "\ud800 half a pair",
    "&lt;b&gt;",
]
PLAN = {
    "kd": {"ratio": 0.9, "loss": "jsd"},
    "plan": {"loss": "R T^2 jsd", "steps": "60 iterations"},
}


def write_run(folder: Path, lines: list[dict] | None = None, steps: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if lines is None:
        lines = [{"iteration": 0, "valid_ce": 9.0, "valid_kd": 7.5, "valid_teacher_ce": 2.5, "valid_agreement": 0.01}]
        for i in range(1, steps + 1):
            lines.append({"iteration": i, "loss": 8.0 / i, "ce": 9.0 / i, "kd": 7.0 / i, "tokens": 512, "step_s": 0.5})
            lines[-1] |= {"tokens_per_s": 1024.0, "lr": 1e-4, "ratio": 0.9, "skipped": i == 3, "odd": float(i)}
        lines.append({"iteration": steps, "valid_ce": 3.0, "valid_kd": 0.5, "valid_teacher_ce": 2.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(folder: Path, **options: object) -> str:
    run = RunFolder.read(folder, **options)
    return render(content_of(run, environment_of(run.run_yaml), NOW))


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text, self.data, self.scripts = "", "", []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += " "
        self.tags.append(tag)
        self.attributes += attrs
        self._is_data = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            if self._is_data:
                self.data += data
            else:
                self.scripts.append(data)
        elif self.cdata_elem is None:
            self.text += data


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_page_has_the_numbers_of_the_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "kd_config.json").write_text(json.dumps(PLAN))
    (folder / "iter_0000060").mkdir()
    page = Page(page_of(folder))
    text = squeezed(page.text)
    assert "✓ finished, 60 of 60 steps" in text
    assert "student, validation at step 0 9.0000 8,103.08 7.5000 1.0%" in text
    assert "student, validation at step 60 3.0000 20.09 0.5000" in text
    assert "teacher, validation 2.5000 12.18" in text
    assert "tokens trained 30,720" in text and "time in training steps 0:00:30" in text
    assert "--kd-loss jsd" in text and "checkpoints 60" in text and "skipped steps 1" in text
    assert "Learning rate" in text and "Ratio R" not in text
    assert "1 more metric " in text and "odd" in text
    data = json.loads(page.data)
    kd = {series["label"]: series for series in data["panels"][1]["values"]}
    assert kd["training"]["x"] == [float(i) for i in range(1, 61)]
    assert kd["training"]["y"] == pytest.approx([7.0 / i for i in range(1, 61)])
    assert (kd["validation"]["x"], kd["validation"]["y"]) == ([0.0, 60.0], [7.5, 0.5])


def test_an_unfinished_run_without_other_files(tmp_path: Path) -> None:
    text = squeezed(Page(page_of(write_run(tmp_path, [{"iteration": 4, "loss": 1.5}]))).text)
    assert "◔ not finished, 4 steps" in text
    assert "The folder has no run.yaml." in text and "None in mkd.log." in text and "Not recorded" in text


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = page_of(write_run(tmp_path))
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("href", "src", "action", "srcset")]
    assert all(value.startswith("#") for value in links)
    assert not re.search(r"https?:|url\((?!#clip)|@import", html)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in dict(page.attributes)["content"] or f"sha256-{digest}" in html


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "<b>run"
    write_run(folder, [{"iteration": 1, "loss": 2.0, text: 3.0}, {"iteration": 2, text: 4.0, f"valid_{text}": 1.0}])
    clean = Page(page_of(write_run(tmp_path / "clean", [{"iteration": 1, "loss": 2.0, "x": 3.0}])))
    sample = {"prompt": text, "text": text}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 2, "samples": [sample]}) + "\n")
    plan = {"kd": {"loss": text, text: text}, "plan": {"loss": text, "steps": text, text: text}}
    (folder / "kd_config.json").write_text(json.dumps(plan))
    yaml = f"about:\n  host: {json.dumps(text)}\n  {json.dumps(text)}: 1\n"
    (folder / "run.yaml").write_text(yaml, errors="replace")
    one_line = text.replace("\x00", "").encode(errors="replace").decode()
    (folder / "mkd.log").write_text(f"2026-01-02 03:04:05+0000 WARNING rank 0: {one_line}\n")
    out = tmp_path / "report.html"
    write_report(folder, out)
    html = out.read_bytes().decode("utf-8")
    page = Page(html)
    allowed = {*clean.tags, "details", "summary", "article", "bdi", "pre", "b", "dl", "dt", "dd"}
    assert set(page.tags) <= allowed
    assert len(page.scripts) == 1 and not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search("[\x00\x1b\u202e\ud800]", page.text.replace("\n", ""))
    assert json.loads(page.data)["panels"]
    if text.startswith("<") or text.startswith("&"):
        assert page.text.count(text) >= 5


def test_damaged_lines_and_huge_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("{broken\n7\n" + "[" * 100_000 + "\n")
        file.write('{"iteration": 61, "loss": NaN, "kd": 1e308, "ce": -1e400, "lr": ' + "9" * 400 + "}\n")
        file.write('{"iteration": 99999999999999999999, "loss": 1}\n{"iteration": true, "loss": 1}\n{"event": "x"}\n')
        file.write('{"iteration": 62, "lo')
    run = RunFolder.read(folder)
    assert run.notes == ["5 damaged lines of metrics.jsonl are left out"]
    assert run.last_iteration == 61
    assert "5 damaged lines" in page_of(folder)


def test_warnings_of_the_log(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    start = "2026-01-02 03:04:0"
    lines = [
        "1+0000 INFO    rank 0: teacher    30 layers",
        "2+0000 WARNING rank 3: slow disk",
        "3+0000 INFO    rank 0: warning: few documents",
        "4+0000 WARNING rank 3: slow disk",
        "5+0000 ERROR   rank 0: --save x: full",
        "6+0000 INFO    rank 0: teacher    30 layers",
    ]
    (folder / "mkd.log").write_text("no line of mkd\n" + "".join(f"{start}{line}\n" for line in lines))
    run = RunFolder.read(folder)
    found = [(warning.level, warning.text, warning.count) for warning in run.warnings]
    assert found == [("WARNING", "few documents", 1), ("WARNING", "slow disk", 2), ("ERROR", "--save x: full", 1)]
    assert run.jobs == 2
    text = squeezed(Page(page_of(folder)).text)
    assert "! warning slow disk 2026-01-02 03:04:04, 2 times" in text
    assert "✕ error --save x: full" in text


def test_samples_by_prompt_newest_first(tmp_path: Path) -> None:
    lines = [{"iteration": 1, "loss": 1.0}]
    for i in (10, 20):
        samples = [{"prompt": "Why?", "text": f"because {i}", "ended": i < 20}, {"prompt": "How?", "text": f"so {i}"}]
        lines.append({"iteration": i, "valid_ce": 1.0, "samples": samples})
    lines.append({"iteration": 30, "samples": ["no", {"prompt": 3}, {"text": 4}]})
    text = squeezed(Page(page_of(write_run(tmp_path, lines))).text)
    assert "prompt Why? step 20 not ended because 20 1 earlier step 10 because 10 prompt How? step 20 so 20" in text


def test_environment_of_run_yaml(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "run.yaml").write_text(
        "about:\n  host: node7\n  versions: {torch: 2.11.0, mkd: 0.1.0}\n  words: [a]\nlr: 1\n"
    )
    text = squeezed(Page(page_of(folder)).text)
    assert "host node7 versions torch 2.11.0 versions mkd 0.1.0" in text
    assert "words: [a]" in text
    for content in ("about: [", "a: &a [*a]", "- 1", "about: 3", None):
        assert environment_of(content) == []


def test_other_jobs_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    for end, teacher in (("", "w/b"), ("-1", "w/a"), ("-10", "<b>url")):
        (folder / f"run{end}.yaml").write_text(f"flags: {{t: {teacher}}}\n")
        plan = {"teacher": teacher, "layout": "DP 1"}
        (folder / f"kd_config{end}.json").write_text(json.dumps({"kd": {}, "plan": plan}))
    (folder / "run-2.yaml").write_text("a record without a plan\n")
    os.mkfifo(folder / "run-3.yaml")
    (folder / "kd_config-1.json").write_text("{")
    run = RunFolder.read(folder)
    assert [(job.name, job.plan) for job in run.other_jobs] == [
        ("run-10.yaml", {"teacher": "<b>url"}),
        ("run-2.yaml", {}),
        ("run-1.yaml", {}),
    ]
    assert [note.partition(" is ")[0] for note in run.notes] == ["run-3.yaml", "kd_config-1.json"]
    text = squeezed(Page(page_of(folder)).text)
    assert "the command of this run: its latest job that did a step flags: {t: w/b}" in text
    assert "run-10.yaml: an earlier job, or one without a step Plan, where it differs teacher <b>url flags:" in text
    monkeypatch.setattr(run_folder, "OTHER_JOBS", 1)
    run = RunFolder.read(folder)
    assert [job.name for job in run.other_jobs] == ["run-10.yaml"]
    assert run.notes == ["3 earlier files run-N.yaml are left out"]


def test_a_run_yaml_that_multiplies_is_left_out() -> None:
    """40 lines whose merge keys stand for 2^40 entries."""
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
    assert environment_of("\n".join([*lines, "about: {host: node7}"])) == []


def test_bounds_and_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    os.mkfifo(folder / "run.yaml")
    (folder / "mkd.log").symlink_to("/dev/zero")
    (folder / "kd_config.json").mkdir()
    run = RunFolder.read(folder)
    assert [note.split(" is left out")[0] for note in run.notes] == ["kd_config.json", "run.yaml", "mkd.log"]
    os.mkfifo(tmp_path / "out.html")
    with pytest.raises(MkdConfigError, match="named pipe"):
        write_report(folder, tmp_path / "out.html")
    monkeypatch.setattr(run_folder, "METRICS_BYTES", 100)
    with pytest.raises(MkdDataError, match="at most 100 are read"):
        RunFolder.read(folder)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(MkdDataError, match="not a regular file"):
        RunFolder.read(folder)


def test_each_of_several_teachers_has_a_row(tmp_path: Path) -> None:
    line = {"iteration": 4, "valid_ce": 3.0, "valid_teacher_ce_1": 2.5, "valid_teacher_ce_2": 2.0}
    rows = results_of(RunFolder.read(write_run(tmp_path, [line | {"valid_teacher_entropy_2": 1.5}]))).rows
    assert [row[:2] for row in rows[:2]] == [["teacher 1, validation", "2.5000"], ["teacher 2, validation", "2.0000"]]
    assert rows[0][-1] == "" and rows[1][-1] == "1.500"


def test_invalid_folders(tmp_path: Path) -> None:
    with pytest.raises(MkdDataError, match="not a folder: give the --save folder"):
        RunFolder.read(tmp_path / "absent")
    with pytest.raises(MkdDataError, match=r"has no metrics.jsonl: give the --save folder of a run"):
        RunFolder.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MkdDataError, match="holds no iteration yet"):
        RunFolder.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"messages": []}')
    with pytest.raises(MkdDataError, match=r"is not a metrics file: no line has an iteration \(keys there: messages"):
        RunFolder.read(tmp_path)


def test_the_error_that_ended_a_job_without_metrics_is_named(tmp_path: Path) -> None:
    time = "2026-01-02 03:04:05+0000"
    (tmp_path / "mkd.log").write_text(
        f"{time} ERROR rank 0: an earlier one\n{time} ERROR rank 0: f.jsonl is \x1b[31mbroken\n"
    )
    ended = r" \(its last job ended before the first evaluation and step: f.jsonl is  \[31mbroken\)"
    with pytest.raises(MkdDataError, match=rf"has no metrics.jsonl{ended}: give the --save folder"):
        RunFolder.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MkdDataError, match=f"holds no iteration yet{ended}$"):
        RunFolder.read(tmp_path)


def test_metrics_file_elsewhere(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", write_run(tmp_path / "other")
    folder.mkdir()
    assert RunFolder.read(folder, other / "metrics.jsonl").last_iteration == 60
    (folder / "kd_config.json").write_text(json.dumps({"kd": {"metrics_file": str(other / "metrics.jsonl")}}))
    assert RunFolder.read(folder).last_iteration == 60


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (2.9, 14.4, [5.0, 10.0]),
        (-3e-5, 9e-5, [0.0, 5e-5]),
        (1e9, 1.1e9, [1e9, 1.05e9, 1.1e9]),
    ],
)
def test_ticks_are_round_numbers_inside(low: float, high: float, ticks: list[float]) -> None:
    assert charts.nice_ticks(low, high, 4) == pytest.approx(ticks)


@pytest.mark.parametrize("values", [[0.0] * 5, [3.0], [1e-320, 2e-320], [-1e99, 1e99], [1.0, 1.0 + 1e-15]])
def test_panels_of_any_range(values: list[float]) -> None:
    log = RunLog("")
    for i, value in enumerate(values):
        log.add({"iteration": i, "ce": value})
    (panel,), _ = charts.panels_of(log)
    low, high = panel.bounds[2:]
    assert low < high and panel.y_ticks
    assert all(0.0 <= tick.at <= charts.HEIGHT for tick in panel.y_ticks)
    assert "nan" not in panel.lines[0].path and "inf" not in panel.lines[0].path


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    lines = [{"iteration": i, "ce": 5.0 + (i % 7) + (90.0 if i == 5000 else 0.0)} for i in range(1, 20_001)]
    html = page_of(write_run(tmp_path, lines))
    assert len(html) < 200_000
    raw, smoothed = json.loads(Page(html).data)["panels"][0]["values"]
    assert max(raw["y"]) > 90 and len(raw["x"]) <= 620
    assert max(smoothed["y"][50:-50]) < 8.2 and smoothed["x"][-1] == 20_000


def test_numbers_of_a_calibration_that_are_none() -> None:
    columns = {name: [0.5, 10**400, math.nan, "1"] for name in ("share", "teacher", "student", "agreement")}
    assert calibration_of(columns) == {name: [0.5, None, None, None] for name in columns}
