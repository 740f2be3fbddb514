"""Convert Hugging Face folders to Megatron checkpoints and back. Runs in one CPU process; no GPU is needed.

    mkd convert import --hf HF_DIR --save MEGATRON_DIR
    torchrun --nproc-per-node N -m mkd convert import --hf HF_DIR --save MEGATRON_DIR
    mkd convert export --load MEGATRON_DIR --hf HF_DIR
    mkd convert export --load ADAPTERS_DIR --hf HF_DIR --merge
    mkd convert inspect --load MEGATRON_DIR
    mkd convert verify --hf HF_DIR --load MEGATRON_DIR --text FILE

A checkpoint contains pickles. Here they are read with a list of classes, in other programs they can run code: inspect a
checkpoint from elsewhere first. Import and export never overwrite: the output must be a new or an empty folder, and it
appears when it is complete.
"""

import argparse
import logging
import os
import warnings
from pathlib import Path

import torch

from mkd import cpu
from mkd.cli.torchrun_report import report_to_torchrun
from mkd.cli.usage import command_parser
from mkd.errors import MkdCheckpointError, MkdConfigError, exit_status, visible

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def import_command(args: argparse.Namespace) -> None:
    """Convert a Hugging Face folder to a torch_dist checkpoint."""
    from mkd.checkpoint.adapters.peft_folder import open_hf_folder
    from mkd.checkpoint.hf.import_ import import_hf

    import_hf(open_hf_folder(args.hf, "--hf"), args.save, args.dtype and DTYPES[args.dtype])
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"wrote {args.save}: load it with --load, --pretrained-checkpoint or --kd-teacher-load")


def export_command(args: argparse.Namespace) -> None:
    """Convert a torch_dist checkpoint to a Hugging Face folder."""
    from mkd.checkpoint.adapters.export import export_merged, export_peft
    from mkd.checkpoint.hf.export import export_hf
    from mkd.checkpoint.hf.whole_model import stored_architecture
    from mkd.checkpoint.megatron.folder import MegatronFolder

    folder, dtype = MegatronFolder(args.load, "--load"), args.dtype and DTYPES[args.dtype]
    if folder.base_fingerprint is None:
        if args.merge or (args.base is not None and stored_architecture(folder) is None):
            flag = "--merge" if args.merge else "--base"
            raise MkdConfigError(f"--load {args.load} holds whole weights and no adapters: leave {flag} out")
        export_hf(folder, args.hf, dtype, architecture=args.architecture, base=args.base, mtp=args.mtp)
    else:
        if args.mtp is not None:
            raise MkdConfigError(
                f"--mtp {args.mtp} is for whole weights, --load {args.load} holds adapters: leave it out"
            )
        (export_merged if args.merge else export_peft)(folder, args.hf, dtype, args.base)
    print(f"wrote {args.hf} from {folder.iteration_dir}")


def inspect_command(args: argparse.Namespace) -> None:
    """Print the content of a folder, without reading weights."""
    from mkd.checkpoint.describe import describe

    for name, value in describe(args.hf, args.load).items():
        print(visible(f"{name:16s} {value}"))


def verify_command(args: argparse.Namespace) -> None:
    """Compare the logits of a Hugging Face folder and a Megatron checkpoint on the same tokens.

    Raises:
        MkdError: the models have different sizes, --length is beyond their positions, or the logits differ by more
            than --tolerance.
    """
    from mkd.checkpoint.compare import check_length, check_same_sizes, compare, random_tokens, tokens_of_text
    from mkd.checkpoint.hf.check import check_tensors, read_architecture
    from mkd.checkpoint.hf.folder import HFFolder
    from mkd.checkpoint.megatron.folder import MegatronFolder

    if args.rows < 1 or args.length < 2:
        raise MkdConfigError(f"--rows is {args.rows} and --length {args.length}; at least 1 and 2 are needed")
    hf, folder = HFFolder(args.hf, "--hf"), MegatronFolder(args.load, "--load")
    folder.check_whole()
    check_tensors(hf, read_architecture(hf)[0])
    check_same_sizes(hf, folder)
    if args.text is None:
        tokens = random_tokens(hf, args.rows, args.length)
    else:
        tokens = tokens_of_text(hf, args.text, args.rows, args.length)
    check_length(folder, args.length)
    found = compare(hf, folder, tokens)
    print(f"{found.tokens} tokens, fp32: max error of a logit {found.max_error:.3g}, mean error {found.mean_error:.3g}")
    print("perplexity: {:.6g} (Hugging Face), {:.6g} (Megatron)".format(*found.perplexities))
    if not found.max_error <= args.tolerance:
        raise MkdCheckpointError(
            f"the logits differ by {found.max_error:.3g}, more than --tolerance {args.tolerance:g}"
        )


def add_verify(commands: argparse._SubParsersAction) -> None:
    """The flags of `verify`."""
    verifier = commands.add_parser("verify", help="compare the logits of both formats in fp32")
    verifier.add_argument("--hf", required=True, metavar="HF_DIR", help="Hugging Face folder, run by transformers")
    verifier.add_argument("--load", required=True, metavar="MEGATRON_DIR", help="Megatron checkpoint, run by megatron")
    verifier.add_argument("--text", type=Path, metavar="FILE", help="text to run on (default: random tokens)")
    verifier.add_argument("--rows", type=int, default=4, metavar="N", help="maximum number of sequences (4)")
    verifier.add_argument("--length", type=int, default=128, metavar="N", help="tokens per sequence (128)")
    verifier.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="largest error allowed (1e-3)")
    verifier.set_defaults(command=verify_command)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="import|export|inspect|verify")
    importer = commands.add_parser("import", help="Hugging Face folder -> Megatron checkpoint")
    importer.add_argument("--hf", required=True, metavar="HF_DIR", help="folder with config.json and safetensors")
    importer.add_argument("--save", required=True, type=Path, metavar="MEGATRON_DIR", help="checkpoint to write")
    importer.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="dtype of the weights (bf16 if the folder is bf16, else fp32)"
    )
    importer.set_defaults(command=import_command)
    exporter = commands.add_parser("export", help="Megatron checkpoint -> Hugging Face folder")
    exporter.add_argument(
        "--load", required=True, metavar="MEGATRON_DIR", help="folder that --save wrote, or one iter_ folder in it"
    )
    exporter.add_argument("--hf", required=True, type=Path, metavar="HF_DIR", help="folder to write")
    exporter.add_argument("--dtype", choices=list(DTYPES), help="dtype of the weights (as stored)")
    exporter.add_argument(
        "--architecture",
        metavar="NAME",
        help="Hugging Face architecture, such as MistralForCausalLM, for a checkpoint without hf_assets",
    )
    exporter.add_argument(
        "--merge", action="store_true", help="adapters (--kd-lora): write the whole model instead of a PEFT folder"
    )
    exporter.add_argument(
        "--base",
        metavar="HF_DIR",
        help="folder of the weights under the adapters, or of a vision-language model (default: that of the training)",
    )
    exporter.add_argument(
        "--mtp",
        metavar="HF_DIR",
        help="folder from which heads for multi-token prediction (tensors mtp.*) are copied, unchanged (default: none)",
    )
    exporter.set_defaults(command=export_command)
    inspector = commands.add_parser("inspect", help="print the content of a folder")
    source = inspector.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="HF_DIR", help="a Hugging Face folder")
    source.add_argument("--load", metavar="MEGATRON_DIR", help="a Megatron checkpoint")
    inspector.set_defaults(command=inspect_command)
    add_verify(commands)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    args = parse_arguments(argv)
    os.environ[cpu.DEVICE_VARIABLE] = "cpu"
    warnings.filterwarnings("ignore")  # megatron's warnings about packages that only training on GPUs needs
    logging.disable(logging.WARNING)
    cpu.activate()
    return exit_status(lambda: args.command(args), report_to_torchrun)
