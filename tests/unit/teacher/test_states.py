"""Hidden states of vLLM, with a stand-in that writes its files: states, faults, retries, what is removed."""

import fcntl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.safetensors_files import write_tensors
from mkd.errors import (
    MkdCheckpointError,
    MkdNodeError,
    MkdNumericError,
    MkdTeacherError,
    MkdTeacherTimeout,
)
from mkd.teacher.inference.apis import APIS
from mkd.teacher.inference.http import HttpServer, ServerAddress, ServerLost
from mkd.teacher.inference.known_text import KnownText
from mkd.teacher.inference.output_layer import OutputLayer
from mkd.teacher.inference.pool import ScoringPool
from mkd.teacher.inference.probe import SHORT, Probe
from mkd.teacher.inference.states_files import StatesFolder, StatesMissing
from mkd.teacher.inference.states_model import TOP_K, StatesModel
from mkd.teacher.inference.states_teacher import WantedStates
from tests.support.inference_server import HFStates, StandIn

VOCAB, WIDTH = 50, 16
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "RMSNorm": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "1 + w, softcap": (Gemma2ForCausalLM, Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
    "LayerNorm, scale": (Cohere2ForCausalLM, Cohere2Config(**SIZES, logit_scale=0.25)),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Models whose norms are not 1, and their folders."""
    made = {}
    for name, (kind, config) in FAMILIES.items():
        torch.manual_seed(1)
        model, folder = kind(config).eval(), tmp_path_factory.mktemp("family")
        model.model.norm.weight.data.normal_(0.5, 0.4)
        (model.lm_head.weight.data).normal_(0.0, 0.7)
        model.save_pretrained(folder)
        made[name] = (model, folder)
    return made


@pytest.fixture(scope="module")
def llama(families: dict[str, tuple[Any, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    model = HFStates(families["RMSNorm"][0])
    with StandIn(
        model.log_probs,
        vocab=VOCAB,
        states=model.states,
        states_dir=tmp_path_factory.mktemp("states"),
    ) as server:
        yield server


@pytest.fixture
def server(llama: StandIn) -> Iterator[StandIn]:
    llama.texts.clear()
    yield llama
    llama.fault = ""
    while llama.files_written < llama.files_named:
        time.sleep(0.001)
    for path in llama.states_dir.iterdir():
        path.unlink()


@pytest.fixture
def model(server: StandIn, families: dict[str, tuple[Any, Path]]) -> StatesModel:
    return model_at(server, families["RMSNorm"][1])


def model_at(server: StandIn, folder: Path, wait_s: float = 0.1) -> StatesModel:
    http = HttpServer(ServerAddress.parse("--kd-teacher-url", server.url), 5.0, 8)
    output = OutputLayer.of(HFFolder(folder, "--kd-teacher-head-hf"))
    return StatesModel(http, APIS["vllm"](), server.name, StatesFolder(server.states_dir, wait_s), output)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_and_heads(families: dict[str, tuple[Any, Path]], family: str) -> None:
    """Norm, LM head and scale of each kind, of the folder alone, give the logits of the model."""
    model, folder = families[family]
    output = OutputLayer.of(HFFolder(folder, "flag"))
    states = HFStates(model).states(TEXT)
    head = torch.cat([output.shard(rank, 2, 56, VOCAB, torch.float32) for rank in range(2)])
    assert head.shape == (56, WIDTH) and not head[VOCAB:].any()
    found = output.logit_map.apply_(output.norm(torch.float32)(states) @ head.T)[:, :VOCAB]
    truth = model(torch.tensor([TEXT])).logits[0].detach()
    assert (found - truth).abs().max() < 2e-5 * truth.abs().max()
    ids = torch.tensor([[1, 5, 9]] * len(TEXT))
    ratios, largest = output.log_ratios(states, ids)
    assert (ratios - (truth.gather(1, ids) - truth[:, 1:2])).abs().max() < 1e-4
    assert largest == pytest.approx(truth.gather(1, ids).abs().max().item(), rel=1e-4)
    assert output.norm(torch.bfloat16)(states.bfloat16()).dtype == torch.bfloat16


def test_another_kind_of_norm(families: dict[str, tuple[Any, Path]]) -> None:
    output = OutputLayer.of(HFFolder(families["RMSNorm"][1], "flag"))
    family = replace(output.family, table=[one for one in output.family.table if "final" not in one.megatron])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mkd.teacher.inference.output_layer.read_architecture", lambda _: (family, output.architecture))
        with pytest.raises(MkdCheckpointError, match=r"LlamaForCausalLM is of a kind that is not computed .*top-k"):
            OutputLayer.of(output.folder)


def test_states(server: StandIn, model: StatesModel) -> None:
    """Those of the model, and no file is left."""
    server.files_named = server.files_written = 0
    assert torch.equal(model.states(TEXT), server.states(TEXT))
    scores = model.score(TEXT, TOP_K, VOCAB)
    assert scores.top_ids.shape == (len(TEXT) - 1, TOP_K)
    wanted = WantedStates(tuple(TEXT), torch.tensor([2, 7]))
    assert torch.equal(wanted.of(model), model.states(TEXT)[[2, 7]])
    assert server.files_named == 4 and not list(server.states_dir.iterdir())


def test_a_file_that_is_written_late(server: StandIn, model: StatesModel) -> None:
    """The lock is waited for."""
    taking, name = [], "cmpl-mkd-1-0-b0.safetensors"
    lock = (server.states_dir / f"{name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = replace(model.folder, wait_s=10.0)
    thread = threading.Thread(target=lambda: taking.append(folder.take(f"/x/{name}", "mkd-1", TEXT, WIDTH, "http://a")))
    thread.start()
    time.sleep(0.05)
    assert not taking
    states = torch.randn(len(TEXT), 1, WIDTH).bfloat16()
    write_tensors(server.states_dir / name, {"hidden_states": states, "token_ids": torch.tensor(TEXT)})
    lock.close()
    thread.join()
    assert torch.equal(taking[0], states[:, 0])


def test_a_folder_that_is_gone_when_late_files_are_searched_for(tmp_path: Path) -> None:
    folder = StatesFolder(tmp_path / "gone", wait_s=0.1)
    folder.give_up("mkd-1")
    folder._given_up.remove_from(folder.folder)


LOST = {
    "no lock": r"there is no cmpl-mkd-.*\.lock in --kd-teacher-states-dir .*shared_storage_path",
    "other folder": r"there is no cmpl-mkd-.*\.lock",
    "locked": r"\.lock is still locked after 0\.1 s",
    "not written": "released the lock .* without writing it: is the disk full",
    "half file": r"truncated.*: is the disk full",
    "nothing": r"is not a safetensors file \(0 bytes",
    "header": "damaged safetensors header",
    "long header": "is not a safetensors file",
    "zeros": "has zeros for 1 tokens: it is not complete",
    "hole": "has zeros for 1 tokens: it is not complete",
}
WRONG = {
    "two layers": r"\[10, 2, 16\] in float32; \[10, 1, 16\] .*one layer|has [0-9,]+ bytes, more than one state",
    "narrow": r"\[10, 1, 15\] in float32; \[10, 1, 16\]",
    "fp64": r"in float64; \[10, 1, 16\] in float32, bfloat16 or float16",
    "short": r"states of another text \(\[9\] token ids; 10 were sent\)",
    "another text": "states of another text",
    "more tensors": "has the tensors .*more",
    "huge": "1,099,511,627,776 bytes, more than one state of 16 numbers for each of 10 tokens",
    "link": "a link is not followed",
    "lock is a link": "a link is not followed",
    "pipe": "not a regular file",
    "outside": "names the file of hidden states '/etc/passwd'",
    "parent": "names the file of hidden states '../cmpl-",
    "no name": "another form|names the file of hidden states 7",
    "no states": r"answers without hidden states .*start it with vllm serve .*extract_hidden_states.*\[2\]",
}


@pytest.mark.parametrize("fault", LOST)
def test_files_that_do_not_come(server: StandIn, model: StatesModel, fault: str) -> None:
    """They are sent again, and what is left of them is removed."""
    server.fault = fault
    with pytest.raises(StatesMissing, match=LOST[fault]) as error:
        model.states(TEXT)
    assert server.url in str(error.value) or "--kd-teacher-states-dir" in str(error.value)
    assert not list(server.states_dir.iterdir())


def test_first_tokens_with_zeros(server: StandIn, model: StatesModel) -> None:
    """An embedding may be zero; layers without biases keep it so while nothing else is attended to."""
    server.fault = "zeros at first"
    states = model.states(TEXT)
    assert not states[:2].any() and states[2:].any(dim=1).all()


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_files(server: StandIn, model: StatesModel, fault: str) -> None:
    """The job ends; nothing is removed, because the file may belong to others."""
    server.fault = fault
    before = set(server.states_dir.iterdir())
    with pytest.raises(MkdTeacherError, match=WRONG[fault]) as error:
        model.states(TEXT)
    assert server.url in str(error.value) and "\n" not in str(error.value)
    assert before <= set(server.states_dir.iterdir())


def test_states_that_are_not_finite(server: StandIn, model: StatesModel) -> None:
    server.fault = "NaN states"
    with pytest.raises(MkdNumericError, match="not finite"):
        model.states(TEXT)


def test_files_of_others_stay(server: StandIn, model: StatesModel) -> None:
    """A file that an answer names, and which has not the name of the request, is removed only if it is the answer."""
    other = server.states_dir / "model.safetensors"
    other.write_bytes(b"weights")
    (server.states_dir / "model.safetensors.lock").touch()
    with pytest.raises(StatesMissing):
        model.folder.take("model.safetensors", "mkd-1", TEXT, WIDTH, "http://a")
    assert other.read_bytes() == b"weights"


def test_files_that_come_after_the_time_limit(
    server: StandIn, families: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed when the next files are read."""
    monkeypatch.setattr("mkd.teacher.inference.states_files._SWEEP_S", 0.0)
    model, impatient = model_at(server, families["RMSNorm"][1]), model_at(server, families["RMSNorm"][1])
    impatient = replace(impatient, server=HttpServer(model.server.address, 0.05, 8), folder=model.folder)
    server.delay_s, server.files_named, server.files_written = 0.2, 0, 0
    try:
        with pytest.raises(ServerLost):
            impatient.states(TEXT)
        ends = time.monotonic() + 10.0
        while not server.files_written and time.monotonic() < ends:
            time.sleep(0.005)
        assert len(list(server.states_dir.glob("cmpl-mkd-*.safetensors"))) == 1
    finally:
        server.delay_s = 0.0
    (server.states_dir / "cmpl-mkd-of-another-job.safetensors").touch()
    model.states(TEXT)
    assert [path.name for path in server.states_dir.iterdir()] == ["cmpl-mkd-of-another-job.safetensors"]


def probe_of(**changes: Any) -> Probe:
    text = tuple((7919 * n) % VOCAB for n in range(1, 4 * SHORT))
    values = dict(text=text, sentence=None, top_k=TOP_K, vocab=VOCAB, longest=40, flag="--kd-teacher-url")
    return Probe(**values | {"timeout_s": 0.0} | changes)


def test_probe(server: StandIn, model: StatesModel) -> None:
    probe_of().run([model])
    assert not list(server.states_dir.iterdir())


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("other layer", {}, ["do not give its own log-probabilities", "another layer", "--kd-teacher-head-hf", "[2]"]),
        ("no states", {}, ["answers without hidden states", "ExampleHiddenStatesConnector", "shared_storage_path"]),
        ("other folder", {}, ["there is no cmpl-mkd-", "shared_storage_path", "start the server with vllm serve"]),
        ("", {"longest": 64}, ["maximum context length", "--max-model-len 65"]),
    ],
)
def test_probe_refuses(
    server: StandIn, model: StatesModel, fault: str, changes: dict[str, Any], words: list[str]
) -> None:
    """At once, with the command that starts the server."""
    server.fault = fault
    with pytest.raises(MkdTeacherError) as error:
        probe_of(**changes, timeout_s=60.0).run([model])
    assert [word for word in words if word not in str(error.value)] == [], error.value


def test_the_folder_of_another_model(server: StandIn, families: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """Another norm or LM head is found, also in a model of the same sizes."""
    torch.manual_seed(2)
    LlamaForCausalLM(FAMILIES["RMSNorm"][1]).save_pretrained(tmp_path)
    with pytest.raises(MkdTeacherError, match=f"--kd-teacher-head-hf {tmp_path} .*another model is served"):
        probe_of().run([model_at(server, tmp_path)])


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MkdNodeError, match=r"--kd-teacher-states-dir .*/none is not a folder: create it"):
        StatesFolder(tmp_path / "none", 1.0).check()


def test_pool(server: StandIn, model: StatesModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are missing for a while; then the texts are answered. A server that changes its layer is found."""
    monkeypatch.setattr("mkd.teacher.inference.pool._FIRST_PAUSE_S", 0.005)
    known = KnownText(tuple(TEXT[:6]), model.score(TEXT[:6], TOP_K, VOCAB))
    pool: Any = ScoringPool([model], known, lambda one, text: text.of(one), top_k=TOP_K, vocab=VOCAB)
    try:
        server.fault = "not written"
        answers = [pool.submit(WantedStates((n, *TEXT), torch.tensor([0, n]))) for n in range(6)]
        ends, problem = time.monotonic() + 10.0, ""
        while "without writing it: is the disk full" not in problem:
            assert time.monotonic() < ends, problem
            with pytest.raises(MkdTeacherTimeout) as error:
                pool.check_silence(0.0, -1.0)
            problem = str(error.value)
        server.fault = ""
        for n, answer in enumerate(answers):
            assert torch.equal(answer.result(timeout=10.0), model.states((n, *TEXT))[[0, n]])
        server.fault = "other layer"
        with pytest.raises(MkdTeacherError, match="do not give its own log-probabilities"):
            pool.submit(WantedStates(tuple(TEXT), torch.tensor([0]))).result(timeout=10.0)
    finally:
        pool.close()
