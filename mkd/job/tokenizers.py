"""The student's tokenizer, and teachers sorted by whether they share it."""

from argparse import Namespace
from pathlib import Path

from mkd.checkpoint.source import (
    EnsembleSource,
    ModelSource,
    TeacherSource,
    common_vocabulary,
    compare_tokenizers,
    has_other_tokenizer,
)
from mkd.checkpoint.tokenizer_hash import tokenizer_hash
from mkd.config.kd_config import KDConfig
from mkd.errors import MkdConfigError
from mkd.utils.logging import logger
from mkd.utils.model_folders.tokenizer_flag import tokenizer_flag


def folder_of_tokenizer(args: Namespace, student: ModelSource | None) -> Path | None:
    """Folder of the student's tokenizer; None if it is not a Hugging Face folder.

    Args:
        args: Megatron's.
        student: source of --kd-student-hf; None without the flag.
    """
    if student is not None and student.tokenizer_folder is not None:
        return student.tokenizer_folder
    is_folder = args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model is not None
    return Path(args.tokenizer_model) if is_folder and Path(args.tokenizer_model).is_dir() else None


def hash_of_tokenizer(args: Namespace) -> str | None:
    """Hash of the student's tokenizer; None if it is not a Hugging Face folder."""
    if args.tokenizer_type != "HuggingFaceTokenizer" or not Path(args.tokenizer_model).is_dir():
        return None
    return tokenizer_hash(Path(args.tokenizer_model), tokenizer_flag(args))


def sort_teachers(
    kd: KDConfig,
    student: str,
    student_vocab: int,
    student_hash: str | None,
    teacher: TeacherSource,
    tokenizer_folder: Path | None = None,
) -> tuple[list[ModelSource], int]:
    """The teachers with other tokenizers, and the number of tokens that the student shares with the other teachers.

    Args:
        kd: the flags; other tokenizers are expected or refused by them.
        student, student_vocab, student_hash: see `common_vocabulary`.
        teacher: one, or several.
        tokenizer_folder: of the student's tokenizer; None if unknown.

    Raises:
        MkdConfigError: as `common_vocabulary`, of a teacher with another tokenizer without --kd-xtoken-loss; or the
            flag is given and there is none.
    """
    teachers = teacher.sources if isinstance(teacher, EnsembleSource) else (teacher,)
    other = [one for one in teachers if has_other_tokenizer(student_hash, one)]
    renamed = other if kd.same_tokenizer else []
    renamed = [one for one in renamed if _has_other_names(tokenizer_folder, one)]
    foreign = [one for one in other if kd.xtoken_loss and one not in renamed]
    for one in teachers:
        if one not in foreign:
            if kd.xtoken_loss and not foreign and None in (student_hash, one.tokenizer_hash):
                raise MkdConfigError(
                    f"--kd-xtoken-loss is {kd.xtoken_loss}, but the tokenizers of {student} and {one.origin} are not "
                    "both known: put their files into the folders"
                )
            student_vocab = common_vocabulary(
                student,
                student_vocab,
                student_hash,
                one,
                folder=tokenizer_folder,
                renamed_control_tokens=kd.same_tokenizer,
            )
    if kd.xtoken_loss and not foreign:
        raise MkdConfigError(
            f"--kd-xtoken-loss is {kd.xtoken_loss}, but {student} and {teacher.origin} have the same tokenizer: "
            "leave it out"
        )
    for one in renamed:
        logger.warning(
            f"--kd-same-tokenizer: {student} and {one.origin}: {compare_tokenizers(tokenizer_folder, one)}. Where "
            "these ids occur in the data, the teacher reads its own token of that id, or an untrained one"
        )
    return foreign, student_vocab


def _has_other_names(folder: Path | None, teacher: ModelSource) -> bool:
    """True if a teacher's tokenizer differs from the student's in names of control tokens only."""
    difference = compare_tokenizers(folder, teacher)
    return difference is not None and difference.is_in_names_only
