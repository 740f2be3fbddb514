"""examples/on_policy/smollm2: the script with small models, as a user calls it, and its measurements."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mkd.rollout.interface import WrittenText
from tests.support.chats import PLAIN, chat_tokenizer, talk, write_lines
from tests.support.e2e.quick_python import serving
from tests.support.e2e.small_job import ROOT, TEACHER, make_model, make_tokenizer

EXAMPLE = ROOT / "examples/on_policy/smollm2"
TORCHRUN = (
    '#!/bin/sh\nshift 6  # --standalone --nproc-per-node N -m mkd train\nexec python {root}/pretrain_kd.py "$@"\n'
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_model(folder, make_tokenizer(), 1, TEACHER | {"max_position_embeddings": 512})
    chat_tokenizer(folder, PLAIN)
    return folder


@pytest.fixture(scope="module")
def executables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with serving(tmp_path_factory.mktemp("python")) as folder:
        torchrun = folder / "torchrun"
        torchrun.write_text(TORCHRUN.format(root=ROOT))
        torchrun.chmod(0o755)
        yield folder


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the example; its folder is where its imports are looked up."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, found)
    spec.loader.exec_module(found)
    return found


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int | None:
    """Exit status of a script's main function."""
    for other in ("answers", "score", "collect"):
        module(other, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *words])
    return module(name, monkeypatch).main()


def answer(index: int) -> dict:
    """An answer that ended, which random models seldom write."""
    messages = talk(f"What does function {index} do?", "It does " + "something " * (index % 3 + 1))
    return {"messages": messages, "prompt_tokens": [1, 2, 3], "answer_tokens": [4, 5, 6, 7, index], "ended": True}


def run_example(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """run.sh, which must succeed."""
    done = subprocess.run(["bash", EXAMPLE / "run.sh"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_trains_and_writes_results(teacher: Path, executables: Path, tmp_path: Path) -> None:
    data = tmp_path / "runs/data"
    data.mkdir(parents=True)
    write_lines(data / "teacher.train.jsonl", [answer(index) for index in range(16)])
    write_lines(data / "teacher.held_out.jsonl", [answer(index) for index in range(4)])
    work = {
        "QUESTIONS": 8,
        "HELD_OUT": 3,
        "TOKENS": 6,
        "LENGTH": 256,
        "ROWS": 4,
        "RANKS": 1,
        "START_STEPS": 2,
        "STEPS": 2,
    }
    variables = work | {"EVALS": 1, "METHODS": "written", "KEEP": "0,3", "TEACHER": teacher, "RUNS": tmp_path / "runs"}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"MKD_SKIP_SETUP": "1", "PATH": f"{executables}:{os.environ['PATH']}"}
    environment |= {name: str(value) for name, value in variables.items()}
    done = run_example(environment)
    found = json.loads((tmp_path / "runs/results.json").read_text())
    assert found["texts"] == 16
    assert found["start"]["steps"] == found["methods"]["written"]["steps"] == 2
    greedy = found["methods"]["written"]["greedy"]
    assert list(greedy) == ["0", "2"]
    # The first evaluation of the second training has the answers of the last one of the first training.
    assert greedy["0"] == found["start"]["greedy"]["2"]
    assert all(scores["answers"] == 3 and scores["perplexity"] > 1 for scores in greedy.values())
    assert found["methods"]["written"]["written_tokens"].keys() == {"1", "2"}
    assert (tmp_path / "runs/samples.md").read_text().count("written texts, reverse KL") == 3
    assert (tmp_path / "runs/smollm2.png").stat().st_size > 10_000
    assert "| written texts, reverse KL | 2 |" in done.stdout
    # Again, with another method: what is there is kept.
    done = run_example(environment | {"METHODS": "written given"})
    assert "given: done" in done.stdout and "start: done" not in done.stdout and "written: done" not in done.stdout
    again = json.loads((tmp_path / "runs/results.json").read_text())
    assert again["start"] == found["start"] and again["methods"]["written"] == found["methods"]["written"]
    assert list(again["methods"]) == ["written", "given"]


def test_answers_are_written_and_collected(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts after the trainings, with metrics as mkd writes them."""
    data = tmp_path / "data"
    for folder in (data, tmp_path / "pruned", tmp_path / "start", tmp_path / "written"):
        folder.mkdir()
    questions = write_lines(
        data / "questions.jsonl", [{"messages": talk(f"What is {name}?")} for name in ("a dict", "x")]
    )

    def answers_to(out: Path, *flags: str) -> list[dict]:
        words = ("--hf", str(teacher), "--questions", str(questions), "--out", str(out), "--tokens", "8", *flags)
        assert run_script("answers", monkeypatch, *words) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    greedy = answers_to(data / "teacher.greedy.jsonl", "--temperature", "0", "--batch", "1")
    assert [record["messages"][0]["content"] for record in greedy] == ["What is x?", "What is a dict?"]
    assert all(1 <= len(record["answer_tokens"]) <= 8 for record in greedy)
    # Padding of a batch changes no text.
    assert answers_to(data / "teacher.held_out.jsonl", "--temperature", "0") == greedy
    sampled = answers_to(data / "train.jsonl", "--samples", "2")
    assert len(sampled) == 4 and answers_to(tmp_path / "pruned/answers.jsonl", "--samples", "2") == sampled

    prompts = [AutoTokenizer.from_pretrained(teacher).decode(record["prompt_tokens"]) for record in greedy]
    text = "It is <b>something</b>.\x1b\n"
    samples = [{"prompt": prompt, "text": text, "tokens": 8, "ended": True} for prompt in prompts]
    for name in ("start", "written"):
        answers_to(tmp_path / name / "answers.jsonl")
        steps = [{"iteration": step, "step_s": 0.5, "tokens": 10, "written_repeated": 0.25} for step in (1, 2)]
        evaluations = [{"iteration": step, "samples": samples} for step in (0, 2)]
        write_lines(tmp_path / name / "metrics.jsonl", [*steps, *evaluations])
    results, shown = tmp_path / "results.json", tmp_path / "samples.md"
    words = (str(tmp_path), "--teacher", str(teacher), "--methods", "written", "text")
    assert run_script("collect", monkeypatch, *words, "--out", str(results), "--samples", str(shown)) == 0
    found = json.loads(results.read_text())
    assert list(found["methods"]) == ["written"]  # the training with the other method has not run
    assert found["methods"]["written"]["tokens"] == 20
    tokens = AutoTokenizer.from_pretrained(teacher).encode(text)
    scores = found["methods"]["written"]["greedy"]["2"]
    assert scores["tokens"] == len(tokens) + 1  # the metrics have the text without its end token
    assert (scores["answers"], scores["ended"]) == (2, 1.0)
    line = "- written texts, reverse KL: It is &lt;b&gt;something&lt;/b&gt;.\\x1b\n"
    assert shown.read_text().count(line) == 2
    assert run_script("draw", monkeypatch, str(results), "--out", str(tmp_path / "drawn.png")) is None
    assert (tmp_path / "drawn.png").stat().st_size > 10_000


def test_a_folder_that_names_another_one(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would load the model that adapter_config.json names."""
    folder, out = tmp_path / "teacher", tmp_path / "answers.jsonl"
    shutil.copytree(teacher, folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "other", "peft_type": "LORA"}')
    questions = write_lines(tmp_path / "questions.jsonl", [{"messages": talk("What is x?")}])
    words = ("--hf", str(folder), "--questions", str(questions), "--out", str(out))
    assert run_script("answers", monkeypatch, *words) == 1
    assert f"answers: --hf {folder} has an adapter_config.json" in capsys.readouterr().err
    assert run_script("answers", monkeypatch, "--hf", str(tmp_path / "absent"), *words[2:]) == 1
    assert f"answers: --hf {tmp_path}/absent does not exist" in capsys.readouterr().err
    assert not out.exists()


def test_perplexity_of_the_teacher(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of different lengths in one batch, against transformers' loss of each text alone."""
    module("answers", monkeypatch)
    score = module("score", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    answers = [([5, 6, 7], WrittenText((8, 9, 8, 9, 8, 9, 8), True)), ([10], WrittenText((11, 12), False))]
    losses = []
    for prompt, text in answers:
        ids = torch.tensor([[*prompt, *text.tokens]])
        labels = torch.tensor([[-100] * len(prompt) + [*text.tokens]])
        losses.append(model(input_ids=ids, labels=labels).loss.item())
    found = score.score(model, answers)
    assert found["perplexity"] == pytest.approx(math.exp((7 * losses[0] + 2 * losses[1]) / 9), rel=1e-5)
    # 8989, 9898, 8989, 9898: two of four runs of four tokens have occurred before.
    expected = {"answers": 2, "tokens": 4.5, "ended": 0.5, "repeated": 0.5, "different": 0.5}
    assert {name: found[name] for name in expected} == expected


def test_no_question_is_in_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_questions = module("make_questions", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["make_questions", "--out", str(tmp_path)])
    make_questions.main()
    held_out, train = (
        [json.loads(line)["messages"][0]["content"] for line in (tmp_path / f"{part}.questions.jsonl").open()]
        for part in ("held_out", "train")
    )
    assert len(held_out) == 32 and len(train) > 1000
    assert len({*held_out, *train}) == len(held_out) + len(train)
    assert "What does Python's os.path.join do? Answer in one sentence." in {*held_out, *train}
