"""Small tokenizers of the kinds that models use, trained on real text."""

import json
from functools import cache
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mkd.xtoken.text.tokens import SpanTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = list(topics.values())
KINDS = ("byte_bpe", "unigram", "metaspace_bpe", "wordpiece")


def _with_model(tokenizer: Tokenizer, **changes: object) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    content["model"].update(changes)
    return Tokenizer.from_str(json.dumps(content))


def _byte_bpe() -> tuple[Tokenizer, dict[str, str]]:
    """As GPT-2, Llama 3 and Qwen. Its post-processor hides whitespace from offsets, as some do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|start|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer, {"eos_token": "<|end|>", "pad_token": "<|end|>", "bos_token": "<|start|>"}


def _unigram() -> tuple[Tokenizer, dict[str, str]]:
    """As T5 and XLM, with a normalizer that composes characters, and bytes for what it has not seen."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=[*special, *BYTES], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:40], trainer)
    return _bytes_are_plain(_with_model(tokenizer, byte_fallback=True)), _SENTENCEPIECE


def _metaspace_bpe() -> tuple[Tokenizer, dict[str, str]]:
    """As Llama 2 and Gemma: no words before the merges, bytes for what it has not seen; begins with <s>."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")  # keeps training short
    trainer = trainers.BpeTrainer(
        vocab_size=1100, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(TEXTS[:20], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _bytes_are_plain(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer, _SENTENCEPIECE


def _wordpiece() -> tuple[Tokenizer, dict[str, str]]:
    """As BERT: drops whitespace and control characters, lower case, no accents, unknown words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    return tokenizer, roles


_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def _bytes_are_plain(tokenizer: Tokenizer) -> Tokenizer:
    """The trainers make bytes special tokens; in models they are not."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(content))


_MAKERS = {"byte_bpe": _byte_bpe, "unigram": _unigram, "metaspace_bpe": _metaspace_bpe, "wordpiece": _wordpiece}


@cache
def transformers_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, as transformers wraps it."""
    tokenizer, roles = _MAKERS[kind]()
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=kind, **roles)


@cache
def span_tokenizer(kind: str) -> SpanTokenizer:
    """The same with spans."""
    return SpanTokenizer(transformers_tokenizer(kind))
