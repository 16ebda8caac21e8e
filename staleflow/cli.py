"""The command line: ``staleflow COMMAND``."""

import argparse
from collections.abc import Sequence

from staleflow import __version__
from staleflow.protocol.demo import run_demo


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="staleflow", description="RL post-training under a strict staleness bound.")
    parser.add_argument("--version", action="version", version=f"staleflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="the main job (in this version: the consistency protocol at work)")
    parser.parse_args(arguments)
    print(
        "Training is not part of this version yet. What exists is the protocol that will govern it; here it is at work."
    )
    print(run_demo())
    return 0
