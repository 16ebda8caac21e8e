"""Would a test notice? Changes one thing at a time in ``staleflow/protocol`` and runs its tests against each change.

    python scripts/mutation.py                 # a table, and the changes that no test noticed
    python scripts/mutation.py --json
    python scripts/mutation.py --only schedule.py:80-120

The changes are the usual ones: another comparison, operator, constant or condition, ``min`` for ``max``, a statement
left out, nothing returned. Each runs in a copy of the tree, cheapest tests first, until one fails. A change that
makes the tests run for more than ``LIMIT_S`` seconds counts as noticed: it made a loop endless.
"""

import argparse
import ast
import copy
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("ledger.py", "schedule.py", "layout.py")
TESTS = ("test_ledger.py", "test_psrl_defects.py", "test_against_oracle.py", "test_exhaustive.py")
SKIP = "not groups6 and not batch2-staleness2"
LIMIT_S = 45

COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATOR: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    change: str
    source: str


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """The node, changed in each of the ways that apply to it."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARE[type(op)]:
                yield ast.Compare(node.left, [other()], node.comparators)
        case ast.Compare():
            for index, op in enumerate(node.ops):
                for other in COMPARE[type(op)]:
                    yield ast.Compare(node.left, [*node.ops[:index], other(), *node.ops[index + 1 :]], node.comparators)
        case ast.BinOp() if type(node.op) in OPERATOR:
            yield ast.BinOp(node.left, OPERATOR[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in OPERATOR:
            yield ast.AugAssign(node.target, OPERATOR[type(node.op)](), node.value)
            yield ast.Pass()
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str() as value):
            yield ast.Constant(value + "?")
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield ast.Call(ast.Name("max" if name == "min" else "min"), node.args, node.keywords)
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.If():
            yield ast.If(ast.Constant(True), node.body, node.orelse)
            yield ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.Break():
            yield ast.Pass()
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise() | ast.Assign():
            yield ast.Pass()
        case _:
            return


def not_code(tree: ast.Module) -> set[int]:
    """Nodes that are documentation or annotations: strings that stand alone, types, names of Literals."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts = [node]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns, *(argument.annotation for argument in node.args.args)]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            parts = [node]  # a type alias
        elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__slots__" for t in node.targets):
            parts = [node]
        for part in parts:
            skipped |= {id(inner) for inner in ast.walk(part)} if part else set()
    return skipped


def mutants(path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    tree = ast.parse(source)
    skipped = not_code(tree)
    nodes = list(ast.walk(tree))
    for index, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for variant in variants(node):
            changed = copy.deepcopy(tree)
            target = list(ast.walk(changed))[index]
            Swap(target, copy.deepcopy(variant)).visit(changed)
            ast.fix_missing_locations(changed)
            change = f"{first_line(node)}  ->  {first_line(variant)}"
            yield Mutant(path.name, getattr(node, "lineno", 0), change, ast.unparse(changed))


class Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:90]


def noticed(tree: Path, mutant: Mutant) -> bool:
    target = tree / "staleflow" / "protocol" / mutant.file
    original = target.read_text()
    target.write_text(mutant.source)
    tests = [f"tests/protocol/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", SKIP, *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, timeout=LIMIT_S)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original)


def chosen(only: str | None) -> list[Mutant]:
    found = [mutant for name in FILES for mutant in mutants(ROOT / "staleflow" / "protocol" / name)]
    if only is None:
        return found
    name, _, lines = only.partition(":")
    first, _, last = lines.partition("-")
    span = range(int(first), int(last or first) + 1) if lines else None
    return [mutant for mutant in found if mutant.file == name and (span is None or mutant.line in span)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", metavar="FILE[:LINES]", help="restrict to a file or a range of its lines")
    options = parser.parse_args()
    killed: dict[str, int] = {}
    survivors: list[Mutant] = []
    todo = chosen(options.only)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in ("staleflow", "tests", "pyproject.toml"):
            source = ROOT / name
            copier = shutil.copytree if source.is_dir() else shutil.copy
            tree.mkdir(exist_ok=True)
            copier(source, tree / name)
        for number, mutant in enumerate(todo, 1):
            if noticed(tree, mutant):
                killed[mutant.file] = killed.get(mutant.file, 0) + 1
            else:
                survivors.append(mutant)
                print(f"survived  {mutant.file}:{mutant.line}  {mutant.change}", file=sys.stderr, flush=True)
            if number % 50 == 0:
                print(f"{number} of {len(todo)}, {len(survivors)} survived", file=sys.stderr, flush=True)
    report(todo, killed, survivors, options.json)
    return 0


def report(todo: list[Mutant], killed: dict[str, int], survivors: list[Mutant], as_json: bool) -> None:
    rows = [
        {
            "file": name,
            "mutants": (total := sum(mutant.file == name for mutant in todo)),
            "killed": killed.get(name, 0),
        }
        | {"percent": round(100 * killed.get(name, 0) / total, 1)}
        for name in FILES
        if any(mutant.file == name for mutant in todo)
    ]
    total, dead = len(todo), sum(killed.values())
    percent = round(100 * dead / max(1, total), 1)
    if as_json:
        left = [{"file": m.file, "line": m.line, "change": m.change} for m in survivors]
        print(
            json.dumps(
                {"mutants": total, "killed": dead, "percent": percent, "files": rows, "survivors": left}, indent=1
            )
        )
        return
    for row in rows:
        print("{file:12} {killed:4} of {mutants:4} noticed  {percent:5} %".format(**row))
    print(f"{'all':12} {dead:4} of {total:4} noticed  {percent:5} %")
    for mutant in survivors:
        print(f"survived  {mutant.file}:{mutant.line}  {mutant.change}")


if __name__ == "__main__":
    sys.exit(main())
