"""Hugging Face folders to Megatron checkpoints and back. Runs on one CPU process; no GPU is needed.

    python tools/convert.py import --hf HF_DIR --save MEGATRON_DIR
    python tools/convert.py export --load MEGATRON_DIR --hf HF_DIR

Neither overwrites: the output must be a new or an empty folder, and it appears when it is complete.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd import cpu
from mkd.errors import MkdError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def import_command(args: argparse.Namespace) -> None:
    """HF folder -> torch_dist checkpoint."""
    from mkd.checkpoint.hf_folder import HFFolder
    from mkd.checkpoint.hf_import import import_hf

    import_hf(HFFolder(args.hf, "--hf"), args.save, args.dtype and DTYPES[args.dtype])
    print(f"wrote {args.save}: load it with --load, --pretrained-checkpoint or --kd-teacher-load")


def export_command(args: argparse.Namespace) -> None:
    """torch_dist checkpoint -> HF folder."""
    from mkd.checkpoint.hf_export import export_hf
    from mkd.checkpoint.megatron_folder import MegatronFolder

    folder = MegatronFolder(args.load, "--load")
    export_hf(folder, args.hf, args.dtype and DTYPES[args.dtype])
    print(f"wrote {args.hf} from {folder.iteration_dir}")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="import|export")
    importer = commands.add_parser("import", help="Hugging Face folder -> Megatron checkpoint")
    importer.add_argument("--hf", required=True, metavar="HF_DIR", help="folder with config.json and safetensors")
    importer.add_argument("--save", required=True, type=Path, metavar="MEGATRON_DIR", help="checkpoint to write")
    importer.add_argument("--dtype", choices=["fp32", "bf16"], help="of the weights (bf16 if the folder is, else fp32)")
    importer.set_defaults(command=import_command)
    exporter = commands.add_parser("export", help="Megatron checkpoint -> Hugging Face folder")
    exporter.add_argument(
        "--load", required=True, metavar="MEGATRON_DIR", help="folder that --save wrote, or one iter_ folder in it"
    )
    exporter.add_argument("--hf", required=True, type=Path, metavar="HF_DIR", help="folder to write")
    exporter.add_argument("--dtype", choices=list(DTYPES), help="of the weights (as they are stored)")
    exporter.set_defaults(command=export_command)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    args = parse_arguments(argv)
    os.environ[cpu.DEVICE_VARIABLE] = "cpu"
    warnings.filterwarnings("ignore")  # megatron's remarks on packages that only training on GPUs needs
    logging.disable(logging.WARNING)
    cpu.activate()
    try:
        args.command(args)
    except MkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
