"""The flag that named the student's tokenizer, for messages."""

from argparse import Namespace

TOKENIZER = "--tokenizer-model"


def adopt_tokenizer(args: Namespace, folder: str, origin: str) -> None:
    """Set --tokenizer-model, which was not given, to the folder of a model.

    Args:
        args: Megatron's.
        folder: with the tokenizer's files.
        origin: of the model: its flag, then its folder.
    """
    args.tokenizer_model, args.tokenizer_flag = folder, origin.split()[0]


def tokenizer_flag(args: Namespace) -> str:
    """The flag of the model whose folder was adopted, or --tokenizer-model."""
    return getattr(args, "tokenizer_flag", TOKENIZER)


def tokenizer_origin(args: Namespace) -> str:
    """The flag and folder of the student's tokenizer, or its type if it has no folder (NullTokenizer), for messages."""
    if args.tokenizer_model is None:
        return f"--tokenizer-type {args.tokenizer_type}"
    return f"{tokenizer_flag(args)} {args.tokenizer_model}"
