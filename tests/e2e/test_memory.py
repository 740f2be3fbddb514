"""Folders far larger than the memory in use: read, imported and exported a parameter at a time."""

import subprocess
import sys

import pytest

from benchmarks.inputs import make_sparse
from mkd.checkpoint.hf.folder import HFFolder
from tests.support.e2e import small_job
from tests.support.e2e.small_job import ROOT

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
GIB = 2**30


def run(code: str, *words: object) -> tuple[str, float]:
    """The last output of a Python process, and its peak memory in GiB."""
    tail = "\nprint([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    command = [sys.executable, "-c", code + tail, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    return " ".join(words[-2:-1]), int(words[-1]) / 2**20


CONVERT = "import sys\nfrom mkd.cli import convert\nassert convert.main(sys.argv[1:]) == 0"

# The peak of each conversion in one process; of a tiny model, the libraries are all of it.
PEAKS = """
import sys
from pathlib import Path
from mkd.cli import convert
for model in ("tiny", "small"):
    hf, megatron, out = (f"{sys.argv[1]}/{model}{kind}" for kind in ("", "_megatron", "_out"))
    for words in (["import", "--hf", hf, "--save", megatron], ["export", "--load", megatron, "--hf", out]):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        assert convert.main(words) == 0
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print("peak", line.split()[1])
"""

# One rank of 64 that are not there: torch's fake process group answers for the others.
ONE_RANK_OF_A_LAYOUT = """
import os, sys
os.environ["MKD_DEVICE"] = "cpu"
from mkd import cpu
cpu.activate()
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.load import load_hf_weights
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.hf_folders import CountingFolder
new_group = dist.new_group.__wrapped__
dist.new_group = lambda *args, **options: new_group(*args, **{**options, "backend": "fake", "pg_options": None})
dist.init_process_group.__wrapped__("fake", store=FakeStore(), rank=27, world_size=64)
folder = CountingFolder(sys.argv[1], "--hf")
with layout(8, 8):
    chunks = build_from_arguments(read_architecture(folder)[1], dtype=torch.bfloat16)
    for chunk in chunks:
        for param in chunk.parameters():
            torch.nn.init.constant_(param, float("nan"))
    load_hf_weights(chunks, folder)
    params = [param for chunk in chunks for param in chunk.parameters()]
assert all(param.count_nonzero() == 0 for param in params)
own = sum(param.nbytes for param in params)
assert folder.bytes_read == own, (folder.bytes_read, own)
print(own)
"""


@pytest.mark.slow
def test_70b_folder_is_read_by_one_rank_of_64(tmp_path):
    folder = make_sparse(tmp_path / "hf", LLAMA_70B)
    output, peak = run(ONE_RANK_OF_A_LAYOUT, folder)
    own = int(output) / GIB
    assert 1.9 < own < 2.5  # ten of 80 layers, an eighth of each; the whole folder is 131 GiB
    assert peak < own + 1.5, f"{peak:.2f} GiB for {own:.2f} GiB of parameters"


@pytest.mark.slow
def test_8b_folder_is_converted_within_6_gib(tmp_path):
    folder = make_sparse(tmp_path / "hf", LLAMA_8B)
    _, peak = run(CONVERT, "import", "--hf", folder, "--save", tmp_path / "megatron")
    assert peak < 6.0, f"import: {peak:.2f} GiB"
    _, peak = run(CONVERT, "export", "--load", tmp_path / "megatron", "--hf", tmp_path / "out")
    assert peak < 6.0, f"export: {peak:.2f} GiB"
    assert HFFolder(tmp_path / "out", "--hf").tensors == HFFolder(folder, "--hf").tensors


def test_conversion_holds_a_parameter_and_not_the_model(tmp_path):
    """The same at a size for every day: 0.5 GiB of weights, no parameter above 32 MiB."""
    small = {"num_hidden_layers": 20, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1024}
    tiny = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    make_sparse(tmp_path / "tiny", LLAMA_8B | tiny)
    make_sparse(tmp_path / "small", LLAMA_8B | small)
    (tmp_path / "program.py").write_text(PEAKS)
    done = small_job.run([str(tmp_path)], script=tmp_path / "program.py")
    assert done.status == 0, done.errors[-3000:]
    tiny_import, tiny_export, peak_import, peak_export = (
        int(line.split()[1]) / 2**20 for line in done.output.splitlines() if line.startswith("peak ")
    )
    alone = max(tiny_import, tiny_export)
    assert peak_import < alone + 0.35, f"import: {peak_import:.2f} GiB, {alone:.2f} of them for a tiny model"
    assert peak_export < alone + 0.35, f"export: {peak_export:.2f} GiB, {alone:.2f} of them for a tiny model"
