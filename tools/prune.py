"""Make a smaller student out of a teacher.

    python tools/prune.py depth --hf TEACHER --out STUDENT --every 2          # layers 0, 2, 4, ...
    python tools/prune.py depth --hf TEACHER --out STUDENT --layers 0,1,5,11  # these layers

Writes a Hugging Face folder with the teacher's embeddings, head and tokenizer; give it to --kd-student-hf.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkd.checkpoint.hf_check import check_tensors, read_architecture
from mkd.checkpoint.hf_families import Family
from mkd.checkpoint.hf_folder import HFFolder
from mkd.checkpoint.hf_writer import StagedFolder, WeightsWriter, check_output, plan_bytes, write_json
from mkd.checkpoint.progress import ByteProgress
from mkd.errors import MkdConfigError, exit_status


def chosen_layers(count: int, every: int | None, layers: str | None) -> list[int]:
    """Indices of the teacher's `count` layers to keep, ascending.

    Raises `MkdConfigError` naming --every or --layers when it is not a choice of existing layers.
    """
    if every is not None:
        if every < 1:
            raise MkdConfigError(f"--every is {every}; it must be at least 1")
        return list(range(0, count, every))
    try:
        chosen = [int(word) for word in layers.split(",")]
    except ValueError as error:
        raise MkdConfigError(f"--layers is {layers!r}; give layer numbers such as 0,2,5") from error
    if chosen != sorted(set(chosen)) or not all(0 <= layer < count for layer in chosen):
        raise MkdConfigError(f"--layers is {layers}; give ascending numbers from 0 to {count - 1}")
    return chosen


def kept_tensors(teacher: HFFolder, family: Family, layers: list[int]) -> dict[str, str]:
    """Student tensor -> teacher tensor, in the order of the layers. A tied head that is not stored is left out."""
    args = {**family.megatron_args(teacher.config), "num_layers": len(layers)}
    pairs = {}
    for item in family.tensors(args):
        source = None if item.layer is None else layers[item.layer]
        names = zip(
            item.shapes, (name.format(layer=source, expert=item.expert) for name in item.entry.sources), strict=True
        )
        pairs.update((new, old) for new, old in names if old in teacher.tensors)
    return pairs


def prune_depth(args: argparse.Namespace) -> None:
    """Keep some layers, renumbered. One tensor is in memory at a time."""
    teacher = HFFolder(args.hf, "--hf")
    check_output(args.out, "--out")
    family, sizes = read_architecture(teacher)
    check_tensors(teacher, family)
    layers = chosen_layers(sizes["num_layers"], args.every, args.layers)
    pairs = kept_tensors(teacher, family, layers)
    plan = {new: teacher.tensors[old] for new, old in pairs.items()}
    with StagedFolder(args.out, "--out") as staged, ByteProgress(f"writing {args.out}", plan_bytes(plan)) as progress:
        writer = WeightsWriter(staged.path, plan)
        for new, old in pairs.items():
            tensor = teacher.read(old)
            writer.write(new, tensor)
            progress.advance(tensor.nbytes)
        writer.close()
        for asset in teacher.assets():
            shutil.copyfile(asset, staged.path / asset.name)
        write_json(staged.path / "config.json", {**teacher.config, "num_hidden_layers": len(layers)})
    kept = ", ".join(map(str, layers))
    print(f"wrote {args.out}: layers {kept} of {sizes['num_layers']}, {plan_bytes(plan) / 1e6:.1f} MB")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    depth = parser.add_subparsers(required=True, metavar="depth").add_parser("depth", help="keep some of the layers")
    depth.add_argument("--hf", required=True, metavar="TEACHER", help="folder with config.json and safetensors")
    depth.add_argument("--out", required=True, type=Path, metavar="STUDENT", help="folder to write: new, or empty")
    choice = depth.add_mutually_exclusive_group(required=True)
    choice.add_argument("--every", type=int, metavar="N", help="keep layers 0, N, 2N, ...")
    choice.add_argument("--layers", metavar="LIST", help="keep these layers, counted from 0")
    depth.set_defaults(command=prune_depth)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after a message on stderr."""
    args = parse_arguments(argv)
    return exit_status(lambda: args.command(args))


if __name__ == "__main__":
    sys.exit(main())
