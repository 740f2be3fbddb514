"""Texts that the student writes: those of transformers, in every layout, and nothing of the training changes.

Without `-m slow`, one rank writes with every family and each parallel layout with the families whose attention,
vocabulary or experts it splits; `-m slow` runs every family in every layout with both engines.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from transformers import AutoModelForCausalLM

from mkd.checkpoint.hf.check import read_architecture
from mkd.checkpoint.hf.folder import HFFolder
from mkd.checkpoint.hf.load import load_hf_weights
from mkd.distributed.groups import Groups
from mkd.rollout.engine import block_sum, token_layout
from mkd.rollout.engine.block_sum import add_outputs_reference
from mkd.rollout.engine.sampler import NextToken
from mkd.rollout.interface import Decoding, Engine, Request
from mkd.rollout.write import write_texts
from tests.dist.test_hf_families import GEMMA2, GEMMA3, MODELS, NO_SPECIAL_TOKENS
from tests.support.dist.gpt_models import build_from_arguments, layout
from tests.support.dist.kd_samples import VOCAB
from tests.support.dist.kd_step import Layout, Models, build_student, parallel_state
from tests.support.hf_folders import make_model

TWO = {"num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TWO},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **TWO},
    "olmo2": {"model_type": "olmo2", **TWO},
    "gemma2": {**GEMMA2, **TWO},
    "gemma3": {**GEMMA3, **TWO},
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **TWO,
    },
    **{
        name: {**MODELS[model], **NO_SPECIAL_TOKENS}
        for name, model in {
            "windows": "mistral, windows by layer",
            "biases of attention": "llama, biases of attention",
            "moe with latent attention": "deepseek v3, yarn, groups of experts, dense layer",
            "moe with sinks": "gpt-oss",
            "parallel block": "cohere 2",
            "moe with layers without rope": "llama 4",
            "moe with wide norms": "olmoe, one normalized expert per token",
            "moe with groups": "deepseek v2, groups by their best expert",
            "hybrid": "qwen3.5",
            "hybrid moe": "qwen3-next",
        }.items()
    },
    # transformers' steps of one token have no lower limit of the time step
    **{
        name: {**MODELS[model], **NO_SPECIAL_TOKENS, "time_step_min": 1e-3}
        for name, model in {"hybrid of mixers": "nemotron-h", "hybrid moe of mixers": "nemotron 3 nano"}.items()
    },
}
TOKENS, LONGEST = 16, 64
PROMPTS = [[5, 9, 77], [1], list(range(40, 63)), [130, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
"""Prompts of different lengths; one of them ends where a row is padded to more."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp("hf") / "m", **sizes) for name, sizes in FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Texts of transformers, by family."""
    found = {name: generated(path) for name, path in folders.items()}
    for texts in found.values():
        assert len({token for text in texts for token in text}) > 10, "the texts would be alike by chance"
    return found


def generated(folder: Path, end: int | None = None) -> list[list[int]]:
    """New tokens of each prompt, up to the end token if there is one."""
    model, texts = AutoModelForCausalLM.from_pretrained(folder), []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=end)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def texts_of(chunks: list, prompts: list, options: Decoding, engine: Engine) -> list[list[int]]:
    found = write_texts(
        chunks, Groups.from_megatron(), [Request(tuple(prompt), i) for i, prompt in enumerate(prompts)], options, engine
    )
    for text in found:
        assert text.ended == (text.tokens[-1] in options.end_tokens)
    return [list(text.tokens) for text in found]


def decoding(**changes: Any) -> Decoding:
    values = dict(tokens=TOKENS, end_tokens=frozenset(), true_vocab=131, rows=2, longest=LONGEST, length_multiple=1)
    return Decoding(**{**values, **changes})


def written(
    rank: int, world_size: int, folders: dict[str, Path], tp: int, pp: int, ep: int, end: int | None, engine: Engine
) -> dict:
    """name -> texts of each family."""
    found = {}
    with layout(tp, pp, ep=ep, etp=1 if ep > 1 else tp):
        for name, path in folders.items():
            folder = HFFolder(path, "--hf")
            chunks = build_from_arguments(read_architecture(folder)[1], ep if "moe" in name else 1)
            load_hf_weights(chunks, folder)
            chunks[0].config.overlap_p2p_comm = False  # as megatron's checks set it without virtual stages
            if engine == "cached" and "latent" in name:
                chunks[0].config.apply_rope_fusion = True  # which has no kernel on CPU
            options = decoding(end_tokens=frozenset() if end is None else frozenset({end}))
            chunks[0].train()
            found[name] = texts_of(chunks, PROMPTS, options, engine)
            assert chunks[0].training
            assert chunks[0].config.apply_rope_fusion == (engine == "cached" and "latent" in name)
    return found


SPLITS = {"one": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "ep2": (1, 1, 2)}
"""TP, PP and EP sizes."""
# Under tensor parallelism: a tied vocabulary, norms of heads and of all heads, and windows. Under pipeline parallelism:
# layers that differ.
QUICK: dict[tuple[str, Engine], set[str]] = {
    ("one", "cached"): {name for name in FAMILIES if "hybrid" not in name},
    ("tp2", "cached"): {"qwen3", "olmo2", "gemma3"},
    ("pp2", "cached"): {"gemma3", "moe with latent attention"},
    ("ep2", "cached"): {"qwen3 moe", "moe with latent attention", "moe with sinks"},
    ("one", "uncached"): {"gemma2", "qwen3 moe", "hybrid", "hybrid moe", "hybrid of mixers", "hybrid moe of mixers"},
    ("tp2", "uncached"): {"gemma2", "hybrid", "hybrid of mixers"},
    ("pp2", "uncached"): {"gemma2"},
    ("ep2", "uncached"): {"qwen3 moe"},
}
"""Families that write without `-m slow`. Without a cache a step of writing is a forward pass, which test_hf_families.py
has for every family."""


@pytest.mark.parametrize(("split", "engine"), QUICK)
def test_texts_are_those_of_transformers(gloo_pool, folders, expected, split: str, engine: Engine) -> None:
    """Token by token."""
    assert_texts(gloo_pool, folders, expected, split, engine, QUICK[split, engine])


@pytest.mark.slow
@pytest.mark.parametrize(("split", "engine"), QUICK)
def test_texts_of_every_family(gloo_pool, folders, expected, split: str, engine: Engine) -> None:
    # Megatron trains experts under tensor parallelism with sequence parallelism only.
    used = {name for name in folders if split != "tp2" or "moe" not in name}
    if engine == "uncached":
        used = {name for name in used if "with" not in name}
    else:  # nothing is cached of a gated delta net or a Mamba layer
        used = {name for name in used if "hybrid" not in name}
    assert_texts(gloo_pool, folders, expected, split, engine, used)


@pytest.mark.slow
def test_texts_of_families_like_others(gloo_pool, tmp_path: Path) -> None:
    """One model of each family that `FAMILIES` lacks."""
    others = {sizes["model_type"]: sizes for sizes in MODELS.values()}
    others = {name: others[name] for name in others.keys() - {sizes["model_type"] for sizes in FAMILIES.values()}}
    paths = {name: make_model(tmp_path / name, **{**NO_SPECIAL_TOKENS, **sizes}) for name, sizes in others.items()}
    for engine in ("cached", "uncached"):
        has_state = {name for name in others if "linear_attention" in others[name].get("layer_types", ())}
        used = {name: path for name, path in paths.items() if (name in has_state) == (engine == "uncached")}
        (found,) = gloo_pool(1).run(written, used, 1, 1, 1, None, engine)
        assert found == {name: generated(path) for name, path in used.items()}


def assert_texts(gloo_pool, folders, expected, split: str, engine: Engine, names: set[str]) -> None:
    tp, pp, ep = SPLITS[split]
    used = {name: path for name, path in folders.items() if name in names}
    for found in gloo_pool(tp * pp * ep).run(written, used, tp, pp, ep, None, engine):
        assert found == {name: expected[name] for name in used}


@pytest.mark.parametrize("engine", ["cached", "uncached"])
def test_a_text_ends_with_an_end_token(gloo_pool, folders, expected, engine) -> None:
    """The others continue."""
    end = expected["llama"][0][4]
    (found,) = gloo_pool(1).run(written, {"llama": folders["llama"]}, 1, 1, 1, end, engine)
    for text, short in zip(expected["llama"], found["llama"], strict=True):
        until = text.index(end) + 1 if end in text else len(text)
        assert short == text[:until]
    assert any(len(text) < TOKENS for text in found["llama"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_ends_its_texts_as_transformers(gloo_pool, folders, expected, name: str) -> None:
    """The end token is one that shortens a text in its middle."""
    end = next(token for text in expected[name] for token in text[4:10] if text.index(token) >= 4)
    engine: Engine = "uncached" if "hybrid" in name else "cached"
    (found,) = gloo_pool(1).run(written, {name: folders[name]}, 1, 1, 1, end, engine)
    whole = generated(folders[name], end)
    assert found[name] == whole
    assert any(4 < len(text) < TOKENS and text[-1] == end for text in whole)


TEMPERATURES = (0.0, 1.5)


def student_texts(
    rank: int,
    world_size: int,
    own: Layout,
    models: Models,
    engine: Engine,
    temperatures: tuple[float, ...] = TEMPERATURES,
    cache_tokens: int | None = None,
    count: int = len(PROMPTS),
) -> dict[float, tuple[list, bool]]:
    """Temperature -> texts of the student of the layout tests, `own.mbs` at a time, and True if random states stay."""
    with parallel_state(own):
        groups = Groups.from_megatron()
        chunks = build_student(own, models, groups)
        prompts = [[token % VOCAB for token in prompt] for prompt in PROMPTS[:count]]
        found = {}
        for temperature in temperatures:
            before = torch.get_rng_state()
            options = decoding(
                tokens=6,
                true_vocab=VOCAB,
                rows=own.mbs,
                length_multiple=2 * own.cp * own.tp,
                temperature=temperature,
                seed=7,
                cache_tokens=cache_tokens,
            )
            texts = texts_of(chunks, prompts, options, engine)
            assert all(chunk.training for chunk in chunks)
            assert ps.get_tensor_model_parallel_world_size() == own.tp
            found[temperature] = texts, torch.equal(before, torch.get_rng_state())
        return found


LAYOUTS = {
    "one": (1, Layout(mbs=1)),
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout(mbs=1)),
    "pp2 vp2": (2, Layout(pp=2, vp=2, mbs=1)),
    "pp2 variable lengths": (2, Layout(pp=2, variable=True)),
    "pp2, 3 and 1 layers": (2, Layout(pp=2, last=1)),
    "tp2 sp cp2": (4, Layout(tp=2, cp=2, sp=True)),
    "tp2 sp pp2 vp2": (4, Layout(tp=2, pp=2, vp=2, sp=True)),
    "cp2 pp2": (4, Layout(cp=2, pp=2)),
}


def engine_of(own: Layout) -> Engine:
    return "uncached" if own.cp > 1 else "cached"


@pytest.fixture(scope="module")
def on_one_rank(gloo_pool) -> dict[bool, dict[float, tuple[list, bool]]]:
    """Experts -> temperature -> texts that are written without a cache, one at a time."""
    return {
        moe: gloo_pool(1).run(student_texts, Layout(mbs=1), Models(moe=moe), "uncached")[0] for moe in (False, True)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_same_texts(gloo_pool, on_one_rank, name: str) -> None:
    """Sampled ones too."""
    ranks, own = LAYOUTS[name]
    for found in gloo_pool(ranks).run(student_texts, own, Models(), engine_of(own)):
        assert found == on_one_rank[False]
    for texts, states_stay in on_one_rank[False].values():
        assert states_stay and len({tuple(text) for text in texts}) == len(PROMPTS)


def test_the_cache_is_left_out_where_it_is_not_possible(gloo_pool, on_one_rank) -> None:
    """The choice does not depend on layouts without context parallelism."""
    for own in (Layout(), Layout(tp=2, sp=True)):
        for found in gloo_pool(own.tp).run(student_texts, own, Models(), "uncached", (0.0,)):
            assert found[0.0] == on_one_rank[False][0.0]


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        pytest.param(2, Layout(ep=2), id="ep2"),
        pytest.param(4, Layout(tp=2, ep=2, sp=True), id="tp2 sp ep2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_students_with_experts(gloo_pool, on_one_rank, ranks: int, own: Layout, temperature: float) -> None:
    for found in gloo_pool(ranks).run(student_texts, own, Models(moe=True), "cached", (temperature,)):
        assert found[temperature] == on_one_rank[True][temperature]


def test_experts_split_over_ranks_with_other_texts(gloo_pool, on_one_rank) -> None:
    """Two data-parallel ranks, one of which writes nothing, hold half of each expert."""
    for found in gloo_pool(2).run(student_texts, Layout(etp=2), Models(moe=True), "cached", (1.5,), None, 1):
        assert found[1.5][0] == on_one_rank[True][1.5][0][:1]


@pytest.mark.parametrize(("own", "cache_tokens"), [(Layout(), 1), (Layout(pp=2), 3 * 32)], ids=["one", "pp2"])
def test_groups_of_texts(gloo_pool, on_one_rank, own: Layout, cache_tokens: int) -> None:
    """Two texts at a time, which is the least that the layout can compute."""
    for found in gloo_pool(own.pp).run(student_texts, own, Models(), "cached", (1.5,), cache_tokens):
        assert found[1.5] == on_one_rank[False][1.5]


def test_prompts_that_are_read_in_several_passes(gloo_pool, on_one_rank) -> None:
    """Four slots, of which a forward pass over prompts fills two, as with --kd-rollout-memory-gb and few rows."""
    (found,) = gloo_pool(1).run(student_texts, Layout(mbs=1), Models(), "cached", (1.5,), 4 * 32)
    assert found[1.5] == on_one_rank[False][1.5]


def texts_of_block_sums(
    rank: int, world_size: int, folders: dict[str, Path], shared: Path
) -> dict[str, tuple[list[list[int]], bool]]:
    """Texts by family where ranks read the outputs of layers, here from files in memory. True if a family does so."""
    sums = []

    def memory(group: dist.ProcessGroup, size: int) -> tuple[torch.Tensor, ...]:
        files = [str(shared / f"{size}.{one}") for one in range(group.size())]
        return tuple(torch.from_file(file, shared=True, size=size, dtype=torch.uint8) for file in files)

    def add(partials: Any, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        dist.barrier()  # in place of the flags of the kernel
        sums.append(len(partials))
        return add_outputs_reference(partials, residual, norm)

    with layout(world_size, 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sum, "add_outputs_reference", add)
        patch.setattr(token_layout, "can_capture", lambda *_: True)
        patch.setattr(token_layout, "peer_memory", memory)
        found = {}
        for name, path in folders.items():
            folder = HFFolder(path, "--hf")
            chunks = build_from_arguments(read_architecture(folder)[1], 1)
            load_hf_weights(chunks, folder)
            sums.clear()
            texts = texts_of(chunks, PROMPTS, decoding(), "cached")
            assert set(sums) <= {world_size}
            found[name] = texts, bool(sums)
        return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_of_layers_that_ranks_read(gloo_pool, folders, expected, tmp_path: Path, ranks: int) -> None:
    """Norms behind a linear layer, and layers of two branches, keep their sums."""
    used = {"llama": True, "qwen3": True, "gemma2": False, "parallel block": False, "biases of attention": False}
    for found in gloo_pool(ranks).run(texts_of_block_sums, {name: folders[name] for name in used}, tmp_path):
        assert found == {name: (expected[name], is_read) for name, is_read in used.items()}


def ended_texts(
    rank: int, world_size: int, engine: Engine, prompts: list[list[int]], own: Layout, moe: bool
) -> list[list[int]]:
    """Texts that end at random, two at a time on each rank if keys and values are cached."""
    with parallel_state(own):
        chunks = build_student(own, Models(moe=moe), Groups.from_megatron())
        ends = frozenset(range(0, VOCAB, 6))
        options = decoding(
            true_vocab=VOCAB, rows=1, end_tokens=ends, temperature=1.5, seed=3, cache_tokens=1, length_multiple=2
        )
        return texts_of(chunks, prompts, options, engine)


@pytest.mark.parametrize(
    ("own", "moe"),
    [
        pytest.param(Layout(mbs=1), False, id="one"),
        pytest.param(Layout(mbs=1, pp=2), False, id="pp2"),
        pytest.param(Layout(mbs=1, ep=2), True, id="ep2"),
    ],
)
def test_slots_are_refilled_while_others_write(gloo_pool, own: Layout, moe: bool) -> None:
    """The text of a slot does not depend on the earlier one in it, nor on when that has ended. Ranks that share experts
    make the same passes while their texts end at other times."""
    prompts = [[(7 * text + 3 * token) % VOCAB for token in range(1 + 5 * text % 19)] for text in range(9)]
    (whole,) = gloo_pool(1).run(ended_texts, "uncached", prompts, Layout(mbs=1), moe)
    ranks = own.pp * own.ep
    assert gloo_pool(ranks).run(ended_texts, "cached", prompts, own, moe) == [whole] * ranks
    assert len(set(map(len, whole))) > 3


def test_a_rank_without_a_text_to_write(gloo_pool) -> None:
    """The second of two data-parallel ranks."""
    prompts, own = [[3, 5, 7]], Layout(mbs=1)
    (whole,) = gloo_pool(1).run(ended_texts, "uncached", prompts, own, False)
    assert gloo_pool(2).run(ended_texts, "cached", prompts, own, False) == [whole, whole]


def log_probabilities(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[texts * tokens] log-probabilities of written tokens: while they are written, and in a pass over whole texts."""
    own, seen = Layout(mbs=4), []
    with parallel_state(own), pytest.MonkeyPatch.context() as patch:
        chunks = build_student(own, Models(), Groups.from_megatron())
        choose = NextToken._choose

        def recorded(self: NextToken, logits: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
            found = choose(self, logits, keys)
            seen.append(logits[:, :VOCAB].log_softmax(dim=1).gather(1, found[:, None]))
            return found

        patch.setattr(NextToken, "_choose", recorded)
        prompts = [[token % VOCAB for token in prompt] for prompt in sorted(PROMPTS, key=len)]  # the order of slots
        options = decoding(true_vocab=VOCAB, rows=4, temperature=1.5)
        texts = texts_of(chunks, prompts, options, "cached")
        whole = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = torch.tensor([[*prompt, *text]])
            positions = torch.arange(ids.shape[1])[None]
            with torch.no_grad():
                logits = chunks[0].eval()(ids, positions, None)[0, len(prompt) - 1 : -1, :VOCAB]
            whole.append(logits.float().log_softmax(dim=1).gather(1, ids[0, len(prompt) :, None]).flatten())
        return torch.cat(seen, dim=1)[: len(prompts), :TOKENS].flatten(), torch.cat(whole)


def test_log_probabilities_are_those_of_training(gloo_pool) -> None:
    """In fp32."""
    ((written, whole),) = gloo_pool(1).run(log_probabilities)
    assert len(written) == TOKENS * len(PROMPTS) and whole.std() > 0.1
    torch.testing.assert_close(written, whole, rtol=0.0, atol=1e-5)


def kept_tokens(rank: int, world_size: int, logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """[b, V/tp] True for the tokens that top-p sampling keeps on this rank."""
    with parallel_state(Layout(tp=world_size)):
        choose = NextToken(Groups.from_megatron(), logits.shape[1], 1.0, top_p)
        return choose._most_probable(logits.chunk(world_size, dim=1)[rank]).isfinite()


def test_top_p_keeps_the_smallest_set_of_tokens(gloo_pool) -> None:
    """Over the whole vocabulary, also where one token is enough and where probabilities are equal."""
    logits = 2.0 * torch.randn(5, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[3], logits[4, 2] = 0.0, 50.0
    found = torch.cat(gloo_pool(2).run(kept_tokens, logits, 0.8), dim=1)
    for row, probabilities in zip(found, logits.softmax(dim=1), strict=True):
        kept, others = probabilities[row], probabilities[~row]
        assert kept.sum() >= 0.8 - 1e-9 and (len(others) == 0 or kept.min() > others.max())
        assert len(set(kept.tolist())) == 1 or kept.sum() - kept.min() < 0.8
    assert found[3].all() and found[4].tolist() == [number == 2 for number in range(10)]
