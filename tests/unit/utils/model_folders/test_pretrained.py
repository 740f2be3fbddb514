"""mkd/utils/model_folders/pretrained.py: no code of a folder runs, and nothing else loads tokenizers or models."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from mkd.config.megatron.arguments import _set_globals
from mkd.errors import MkdCheckpointError, MkdConfigError, MkdDataError
from mkd.utils.model_folders.pretrained import from_disk_alone, load_model, load_tokenizer
from tests.support.e2e.quick_python import serving

ROOT = Path(__file__).resolve().parents[4]
ROOM = "mkd/utils/model_folders/pretrained.py"
FORBIDDEN = {"AutoTokenizer", "AutoConfig", "AutoProcessor", "AutoModel", "dynamic_module_utils", "pipeline"}
CODE = """from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast): pass
class OwnConfig(LlamaConfig): model_type = "own"
class OwnModel(LlamaForCausalLM): pass
"""


def unguarded_loads(source: str) -> list[str]:
    """Calls of `from_pretrained`, and imports of the functions that load a folder's code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained":
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
            found += [f"line {node.lineno}: {name}" for name in names if name in FORBIDDEN]
    return found


def test_one_module_loads_tokenizers_and_models() -> None:
    files = [*(ROOT / "mkd").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    names = {str(path.relative_to(ROOT)): path for path in [*files, ROOT / "pretrain_kd.py"]}
    found = {name: unguarded_loads(path.read_text()) for name, path in names.items()}
    assert {name: loads for name, loads in found.items() if loads}.keys() == {ROOM}


def test_every_load_of_a_folder_forbids_its_code() -> None:
    """The room itself, and the examples, which are scripts of their own."""
    for path in [ROOT / ROOM, *(ROOT / "examples").rglob("*.py")]:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                options = [ast.unparse(keyword) for keyword in node.keywords]
                is_forbidden = "trust_remote_code=False" in options
                is_forbidden |= "**where" in options and "'trust_remote_code': False" in ast.unparse(ast.parse(source))
                assert is_forbidden, f"{path}, line {node.lineno}"


def test_loads_are_found() -> None:
    source = "from transformers import AutoConfig\nAutoTokenizer.from_pretrained('x')\nmodel.from_pretrained\n"
    assert sorted(unguarded_loads(source)) == ["line 1: AutoConfig", "line 2: AutoTokenizer.from_pretrained"]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists when a folder's code ran."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer and a model with code of their own, which creates a file; standard input answers "y"."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "Own", "eos_token": "</s>", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    mapped = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": mapped}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    return folder


def test_code_of_a_tokenizer_is_refused(folder: Path, mark: Path) -> None:
    with pytest.raises(MkdDataError) as error:
        load_tokenizer(str(folder), "--tokenizer-model")
    assert str(error.value).startswith(
        f"--tokenizer-model {folder} needs code of its own (auto_map AutoTokenizer: own.Own"
    )
    assert "remove auto_map" in str(error.value) and "\n" not in str(error.value)
    assert not mark.exists()


def test_code_of_a_model_is_refused(folder: Path, mark: Path) -> None:
    with pytest.raises(MkdCheckpointError, match=r"--hf .* needs code of its own .*auto_map AutoConfig: own.OwnConfig"):
        load_model(folder, "--hf")
    assert not mark.exists()


def test_kernels_of_a_hub_are_refused(folder: Path) -> None:
    config = {"model_type": "llama", "attn_implementation": "someone/attention"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MkdCheckpointError, match=r"attn_implementation in config.json is 'someone/attention'"):
        load_model(folder, "--hf")


def test_a_mapped_tokenizer_of_transformers_is_read_with_its_own_class(folder: Path, mark: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    assert len(load_tokenizer(str(folder))) == 2
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SFTTokenizer"])
def test_tokenizers_of_megatron_run_no_code(
    kind: str, folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    options = {"tokenizer_type": kind, "tokenizer_model": str(folder), "trust_remote_code": False}
    unset = ("metadata_path", "chat_template", "vocab_file", "merge_file", "special_tokens")
    flags = ("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens")
    args = SimpleNamespace(
        **options, **dict.fromkeys(unset), **dict.fromkeys(flags, False), sft_tokenizer_prompt_format="default"
    )
    monkeypatch.setattr("mkd.config.megatron.arguments.set_global_variables", lambda *_, **__: None)
    monkeypatch.setattr("mkd.config.megatron.arguments.rebuild_tokenizer", build_tokenizer)
    args.tensorboard_dir = args.wandb_project = None
    with pytest.raises(MkdConfigError, match=f"{folder} needs code of its own .*own.Own"):
        _set_globals(SimpleNamespace(args=args))
    assert not mark.exists()


def test_time_limit_is_restored() -> None:
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with pytest.raises(KeyError), from_disk_alone():
        raise KeyError
    assert before == dynamic_module_utils.TIME_OUT_REMOTE_CODE


def test_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Megatron's GPT2BPETokenizer names the model gpt2 of the hub, whatever --tokenizer-model is."""
    from huggingface_hub import constants
    from transformers import AutoTokenizer

    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **_: asked.append(words) or [])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OSError), from_disk_alone():
        AutoTokenizer.from_pretrained("gpt2", cache_dir=tmp_path)
    assert asked == []
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("tool", ["preprocess", "build_projection"])
def test_tools_refuse_the_code_of_a_folder(tool: str, folder: Path, mark: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a"}\n')
    flags = {
        "preprocess": ["--input", text, "--output-prefix", tmp_path / "out", "--tokenizer-model", folder],
        "build_projection": ["--student", folder, "--teacher", folder, "--out", tmp_path / "out.safetensors"],
    }
    with serving(tmp_path) as executables:
        command = [str(executables / "python"), str(ROOT / f"tools/{tool}.py"), *map(str, flags[tool])]
        found = subprocess.run(command, input="y\n" * 10, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("error: --")
    assert "auto_map AutoTokenizer: own.Own" in found.stderr.splitlines()[-1]
    assert not mark.exists()


def test_a_pattern_that_backtracks(tmp_path: Path) -> None:
    """Found when the tokenizer is loaded, not in the middle of the data."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(MkdDataError, match=r"--tokenizer-model .*a pattern in its tokenizer.json backtracks"):
        load_tokenizer(str(tmp_path))


def test_pipes_in_a_folder_are_not_waited_for(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).get_vocab() == {"a": 0, "?": 1}
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(MkdDataError, match=r"tokenizer_config\.json is not a regular file"):
        load_tokenizer(str(tmp_path))


def test_an_adapter_is_refused(folder: Path) -> None:
    """transformers loads it, if the package peft is installed, and the folder that it names."""
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(MkdCheckpointError, match=r"has an adapter_config.json.*: merge the adapter"):
        load_model(folder, "--hf")
