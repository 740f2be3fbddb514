"""bench_loss.py and bench_step.py run small on CPU: every row is in the table, and errors are errors."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tolerance import FP32

TOOLS = Path(__file__).resolve().parents[3] / "benchmarks"
LOSS = ["--rows", "8", "--student-width", "16", "--teacher-width", "24", "--vocab", "61", "--dtype", "fp32"]
FEW = ["--warmup", "1", "--iterations", "2"]
ONCE = ["--warmup", "0", "--iterations", "1"]


@pytest.fixture(scope="module")
def tools():
    """Both tools, imported by file name, as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import bench_loss
        import bench_step

        yield bench_loss, bench_step


def rows_of(tool, flags: list[str], file: Path, capsys, times: list[str] = ONCE) -> tuple[dict, str]:
    """(content of the JSON file, the printed table)."""
    assert tool.main([*flags, *times, "--json", str(file)]) == 0
    return json.loads(file.read_text()), capsys.readouterr().out


def test_losses_are_measured_and_correct(tools, tmp_path, capsys, monkeypatch):
    """In fp32 each row is compared with the float64 definitions; one package is missing."""
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    flags = [*LOSS, "--losses", "forward_kl", "--logits-dtype", "auto", "--rows-of", "ours,eager,compile,liger,mcore"]
    seen, out = rows_of(tools[0], [*flags, "--commit", "abc"], tmp_path / "new" / "loss.json", capsys, FEW)
    rows = {(row["name"], row["loss"]): row for row in seen["rows"]}
    assert seen["commit"] == "abc" and torch.__version__.startswith(seen["versions"]["torch"])
    measured = {key for key, row in rows.items() if "failed" not in row}
    assert {
        ("mkd, auto logits", "CE + forward_kl"),
        ("mkd, auto logits", "CE"),
        ("eager torch", "CE + jsd"),
        ("torch.compile, 4096 rows", "forward_kl"),
        ("megatron-core CE, unfused", "CE"),
        ("floor: the four GEMMs, at the beginning", "with teacher"),
        ("floor: the three GEMMs, at the end", "CE"),
    } <= measured
    for key in measured:
        row = rows[key]
        assert row["ms"] > 0 and len(row["ms_all"]) == 2
        if "floor" not in row and key[0] != "megatron-core CE, native":  # rounds its gradient to bf16
            assert max(row[name] for name in ("d_hidden_error", "d_weight_error", "value_error")) < FP32, key
    assert rows["Liger fused-linear JSD", "jsd"]["failed"] == "package liger_kernel is missing"
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(rows) and len({line.count("|") for line in lines}) == 1
    assert "not measured: package liger_kernel is missing" in out


def test_a_wrong_gradient_is_detected(tools, tmp_path, capsys, monkeypatch):
    """The error columns compare gradients, so a correct loss does not hide a wrong one."""
    loss = tools[0]
    right = loss.fused_linear_loss

    def wrong(*args, **options):
        output = right(*args, **options)
        return output._replace(loss=2.0 * output.loss - output.loss.detach())

    monkeypatch.setattr(loss, "fused_linear_loss", wrong)
    flags = [*LOSS, "--losses", "forward_kl", "--logits-dtype", "auto", "--rows-of", "ours"]
    seen, _ = rows_of(loss, flags, tmp_path / "loss.json", capsys)
    row = next(row for row in seen["rows"] if row["name"] == "mkd, auto logits")
    assert row["d_hidden_error"] == pytest.approx(1.0, rel=1e-3)
    assert row["d_weight_error"] == pytest.approx(1.0, rel=1e-3)
    assert row["value_error"] < FP32


def test_a_row_that_fails_does_not_stop_the_others(tools, tmp_path, capsys, monkeypatch):
    def out_of_memory(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried | to allocate")

    monkeypatch.setattr(tools[0], "fused_linear_loss", out_of_memory)
    flags = [*LOSS, "--losses", "forward_kl", "--logits-dtype", "auto", "--rows-of", "ours,sparse,eager"]
    seen, out = rows_of(tools[0], flags, tmp_path / "loss.json", capsys)
    ours = next(row for row in seen["rows"] if row["name"] == "mkd, auto logits")
    assert ours["failed"].startswith("OutOfMemoryError: CUDA out of memory. Tried / to") and "ms" not in ours
    assert sum(row["name"] == "eager torch" and "ms" in row for row in seen["rows"]) == 3
    assert sum("sparse" in row and "ms" in row for row in seen["rows"]) == 1
    assert "not measured: OutOfMemoryError" in out


@pytest.mark.parametrize(
    "flags", [["--losses", "forwardkl"], ["--rows-of", "us"], ["--teacher-gap", "0.1", *LOSS[2:4]]]
)
def test_bad_flags_are_refused(tools, flags, capsys):
    small = ["--teacher-width", "16"] if "--teacher-gap" in flags else []
    with pytest.raises(SystemExit) as exit_:
        tools[0].main([*flags, *small])
    assert exit_.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_steps_are_measured(tools, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    flags = ["--small", "--dtype", "fp32", "--losses", "forward_kl", "--student-layers", "3"]
    seen, out = rows_of(tools[1], flags, tmp_path / "step.json", capsys)
    rows = {row["name"]: row for row in seen["rows"]}
    assert "student 3 layers x 32" in out
    for name in ("mkd", "megatron-core, eager KL", "megatron-core, teacher's logits unused, te CE", "HF, eager KL"):
        row = rows[name]
        assert "failed" not in row, row
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["ms"] * 1e3)
        assert all(ms > 0 for ms in row["parts_ms"].values()) and len(row["parts_ms"]) == 4
        assert out.count(f"| {name} |") == 1
    assert rows["HF, Liger layers, Liger fused-linear JSD"]["failed"] == "package liger_kernel is missing"
    assert rows["megatron-core, Model-Optimizer KL"]["failed"] == "package modelopt is missing"


@pytest.mark.parametrize("tool", [0, 1], ids=["loss", "step"])
def test_supervised_tokens_are_measured_beside_all(tools, tool: int, tmp_path, capsys) -> None:
    sizes = [*LOSS, "--logits-dtype", "auto"] if tool == 0 else ["--small", "--dtype", "fp32"]
    flags = [*sizes, "--losses", "forward_kl", "--rows-of", "ours", "--supervised", "0.25"]
    seen, out = rows_of(tools[tool], flags, tmp_path / "rows.json", capsys)
    rows = [row for row in seen["rows"] if row.get("tokens", "all") != "all"]
    assert {row["tokens"].split()[1] for row in rows} == {"random", "contiguous"}
    assert all("failed" not in row for row in seen["rows"])
    if tool == 0:
        assert max(row[name] for row in rows for name in ("d_hidden_error", "d_weight_error", "value_error")) < FP32
    assert "| ms / all |" in out and len({line.count("|") for line in out.splitlines() if line.startswith("| ")}) == 1


@pytest.mark.parametrize("fraction", ["0", "1.5"])
def test_a_fraction_of_tokens_is_above_0_and_at_most_1(tools, fraction: str, capsys) -> None:
    with pytest.raises(SystemExit):
        tools[0].parse_arguments(["--supervised", fraction])
    assert f"--supervised: {fraction}: must be above 0 and at most 1" in capsys.readouterr().err
