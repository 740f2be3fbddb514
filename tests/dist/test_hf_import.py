"""Import of Hugging Face folders by one rank and by several; the checkpoint loads into other layouts."""

import pytest
import torch

from mkd.checkpoint.hf.export import export_hf
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.import_ import import_hf
from mkd.checkpoint.megatron.folder import MegatronFolder
from mkd.checkpoint.megatron.load import load_megatron_weights
from mkd.errors import MkdCheckpointError
from tests.support.dist.gpt_models import build_chunks, layout, run_stages
from tests.support.hf_folders import LLAMA3_ROPE, change_weights, make_llama, read_weights, reference_logits
from tests.support.tolerance import LOGITS

TOKENS = torch.randint(0, 131, (2, 96), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["tied", "untied"])
def folders(request, tmp_path_factory):
    """(Hugging Face folder, its Megatron checkpoint)."""
    root = tmp_path_factory.mktemp("import")
    make_llama(root / "hf", rope_parameters=LLAMA3_ROPE, tie_word_embeddings=request.param == "tied")
    import_hf(HFFolder(root / "hf", "--hf"), root / "megatron")
    return root / "hf", root / "megatron"


def loaded_logits(rank, world_size, path, tp, pp):
    folder = MegatronFolder(path, "--load")
    with layout(tp, pp):
        chunks = build_chunks(vars(folder.args))
        load_megatron_weights(chunks, folder)
        return run_stages(chunks, TOKENS)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_checkpoint_loads_in_other_layouts(gloo_pool, folders, tp, pp):
    original, checkpoint = folders
    expected = reference_logits(original, TOKENS)
    seen = [x for x in gloo_pool(tp * pp).run(loaded_logits, checkpoint, tp, pp) if x is not None]
    assert len(seen) == tp
    for logits in seen:
        assert (logits[..., :131] - expected).abs().max() <= LOGITS


def load_in_half(rank, world_size, path):
    folder = MegatronFolder(path, "--kd-teacher-load")
    with layout(1, 1):
        chunks = [chunk.half() for chunk in build_chunks(vars(folder.args))]
        try:
            load_megatron_weights(chunks, folder)
        except MkdCheckpointError as error:
            return str(error)


def test_weights_beyond_a_dtype_are_refused(gloo_pool, tmp_path):
    """From a checkpoint into an fp16 teacher, in an fp16 export, and in an import to bf16."""
    path = make_llama(tmp_path / "hf")
    head = read_weights(path)["lm_head.weight"].clone()
    head[3, :2] = 1e5
    change_weights(path, {"lm_head.weight": head})
    import_hf(HFFolder(path, "--hf"), tmp_path / "megatron")
    (message,) = gloo_pool(1).run(load_in_half, tmp_path / "megatron")
    assert "2 values of output_layer.weight are not finite in float16" in message and "--kd-teacher-dtype" in message
    with pytest.raises(MkdCheckpointError, match=r"2 of the 6288 values of tensor lm_head.weight .* --dtype bf16"):
        export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()
    head[3, :2] = torch.finfo(torch.float32).max
    change_weights(path, {"lm_head.weight": head})
    with pytest.raises(MkdCheckpointError, match=r"2 of the \d+ values of tensor output_layer.weight .* --dtype fp32"):
        import_hf(HFFolder(path, "--hf"), tmp_path / "other", torch.bfloat16)
    assert not (tmp_path / "other").exists()


def import_together(rank, world_size, folder, out):
    import_hf(HFFolder(folder, "--hf"), out)


def test_ranks_import_together(gloo_pool, folders, tmp_path):
    original, _ = folders
    gloo_pool(2).run(import_together, original, tmp_path / "megatron")
    sizes = [sum(f.stat().st_size for f in (tmp_path / "megatron").rglob(f"__{rank}_*.distcp")) for rank in range(2)]
    assert min(sizes) > 0.3 * sum(sizes)
    export_hf(MegatronFolder(tmp_path / "megatron", "--load"), tmp_path / "out")
    before, after = read_weights(original), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
