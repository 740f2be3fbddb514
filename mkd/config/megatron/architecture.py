"""The architecture of a model's folder in Megatron's arguments, and flags that contradict it."""

from argparse import Namespace
from typing import Any

from mkd.config.flags import flags_given
from mkd.config.megatron.arg_names import ARGS, ArgRole, comparable, in_order
from mkd.errors import MkdConfigError


def adopt_architecture(args: Namespace, architecture: dict[str, Any], origin: str) -> None:
    """Set the model's architecture from a folder, in place.

    Args:
        args: Megatron's parsed arguments.
        architecture: Megatron argument name -> value.
        origin: flag and folder of the architecture, for error messages.

    Raises:
        MkdConfigError: a flag on the command line contradicts the folder.
    """
    given = flags_given()
    own = {**architecture, **{name: getattr(args, name) for name in architecture if name in given}}
    if "num_query_groups" in given:
        own["group_query_attention"] = True
    elif own.get("group_query_attention") and not architecture.get("group_query_attention"):
        own["num_query_groups"] = args.num_query_groups
    for name in in_order(architecture):
        value = architecture[name]
        if name in given and comparable(name, own) != comparable(name, architecture):
            if name in ARGS and ArgRole.RUN_CHOICE in ARGS[name].roles:
                continue
            raise MkdConfigError(
                f"{given[name]} is {getattr(args, name)}, but {origin} has {value}: leave {given[name]} out, "
                "the architecture is read from the folder"
            )
        setattr(args, name, value)
