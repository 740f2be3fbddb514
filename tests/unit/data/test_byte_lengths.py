"""mkd/data/byte_lengths.py: bytes of tokens add up to the bytes of the text."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mkd.data.byte_lengths import byte_lengths

TEXT = "Ein früher Morgen: 日本語, naïve façade — 🙂🙂 and plain words, words.\n\tdef f(x):\n        return x  # ок\n"


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT[:80]], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    whole.add_tokens(["<tool>", "ös"])  # not special: text that a user or a model writes
    whole.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return whole


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: characters, some pairs of them, and bytes for the rest; ids have a gap."""
    tokens = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz日.,",
        "▁a",
        "nd",
    ]
    vocab = {token: place + 10 * (place > 200) for place, token in enumerate(tokens)}
    model = models.BPE(vocab, [("▁", "a"), ("n", "d")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_bytes_of_byte_level_tokens_add_up() -> None:
    tokenizer = byte_level()
    lengths = byte_lengths(tokenizer)
    assert len(lengths) == len(tokenizer)
    for text in (TEXT, "ös <tool>x", "🙂", ""):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert int(lengths[ids].sum()) == len(text.encode()), text
    assert any(
        len(tokenizer.decode([id]).encode()) != lengths[id] for id in range(len(tokenizer))
    )  # parts of characters
    assert lengths[tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<|im_end|>"])].tolist() == [0, 0, 0]
    assert lengths[tokenizer.convert_tokens_to_ids(["<tool>", "ös"])].tolist() == [6, 3]


def test_bytes_of_tokens_with_byte_fallback_add_up() -> None:
    tokenizer = byte_fallback()
    lengths = byte_lengths(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert {int(lengths[id]) for id in ids} == {1, 2, 3}
    assert int(lengths[ids].sum()) == len(TEXT.encode())


def test_a_special_token_without_id_is_left_out() -> None:
    tokenizer = byte_fallback()
    before = byte_lengths(tokenizer)
    tokenizer.eos_token = ""
    assert None in tokenizer.all_special_ids
    assert byte_lengths(tokenizer).equal(before)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_other_spellings_are_not_known(decoder: object) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert byte_lengths(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None
