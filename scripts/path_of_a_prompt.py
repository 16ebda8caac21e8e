"""How many functions and files of the package a prompt passes, from its admission to the commit of its step.

    python scripts/path_of_a_prompt.py [--list] [--json] [key=value ...]

Trains a few steps of one group each, synchronously, with every process of the run traced. Two counts of what is called
between the last admission and the last commit, when everything is loaded and nothing else is under way: functions that
are given the prompt's group or one of its trajectories, alone or inside something else, and all functions. The package
is the one that Python finds, so ``PYTHONPATH=other/tree`` counts another version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3
SETTINGS = (f"steps={STEPS}", "groups=1", "group_size=2", "staleness=0", "rollout.instances=1")
TRACER = """
import mmap, os, sys, threading
folder = os.path.dirname(__file__)
with open(folder + "/window", "r+b") as file:
    window = mmap.mmap(file.fileno(), 64)  # commits so far; 1 while the last prompt is on its way; its group's name
seen, root = set(), os.sep + "staleflow" + os.sep

def about(value, group, depth=4):
    if isinstance(value, str):
        return value == group or value.startswith(group + "/")
    if not depth:
        return False
    if isinstance(value, dict):
        value = [*value.items()][:32]
    elif type(value).__module__.startswith("staleflow") and not isinstance(value, tuple):
        fields = getattr(value, "__struct_fields__", None) or getattr(type(value), "__slots__", None) or vars(value)
        value = [getattr(value, name, None) for name in fields]
    return isinstance(value, (list, tuple)) and any(about(each, group, depth - 1) for each in value[:32])

def note(frame):
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    arguments = {name: frame.f_locals.get(name) for name in names}
    mine = arguments.pop("self", None)
    group = window[2:].rstrip(bytes(1)).decode()
    try:
        passed = bool(group) and (about(getattr(mine, "name", None), group) or about([*arguments.values()], group))
    except Exception:
        passed = False
    if (code, passed) not in seen:
        seen.add((code, passed))
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(f"{passed:d} {code.co_filename.rpartition(root)[2]}:{code.co_qualname}\\n")

def trace(frame, event, argument):
    code = frame.f_code
    if root not in code.co_filename or code.co_name[0] == "<":
        return
    server = code.co_filename.endswith("trajectories.py")
    if event == "call":
        if server and code.co_name == "admit" and window[0] == STEPS - 1:
            window[1] = 1
        if window[1] and (code, True) not in seen:
            note(frame)
    elif event == "return" and server and code.co_name == "admit" and argument is not None and window[1]:
        name = argument.name.encode()
        window[2 : 2 + len(name)] = name
    elif event == "return" and server and code.co_name == "commit":
        window[0] += 1
        window[1] = 0

threading.setprofile(trace)
sys.setprofile(trace)
"""


def functions(settings: list[str]) -> dict[str, bool]:
    """By name: whether it was given the prompt."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER.replace("STEPS", str(STEPS)))
        Path(folder, "window").write_bytes(bytes(64))
        path = os.pathsep.join([folder, os.path.abspath(os.environ.get("PYTHONPATH") or ".")])
        environment = os.environ | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "staleflow", "train", *SETTINGS, *settings]
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        lines = [line for file in Path(folder).iterdir() if file.name.isdigit() for line in file.open()]
    found: dict[str, bool] = {}
    for line in sorted(lines):  # those that were given it come last
        passed, name = line.split()
        found[name] = passed == "1"
    return found


def count(names: list[str]) -> dict[str, int]:
    return {"functions": len(names), "files": len({name.partition(":")[0] for name in names})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions that are given the prompt, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of two lines")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    found = functions(options.settings)
    passed = sorted(name for name, given in found.items() if given)
    counts = {"given the prompt": count(passed), "all": count([*found])}
    if options.json:
        print(json.dumps(counts))
    else:
        for what, each in counts.items():
            print(f"{what:16} {each['functions']:4} functions in {each['files']} files")
    if options.list:
        print("\n".join(passed))


if __name__ == "__main__":
    main()
