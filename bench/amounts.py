"""Numbers on the command lines of the benches: what makes no sense is refused in one line before anything is measured.

parser.add_argument("--repeats", type=amounts.count)       # 1 or more
parser.add_argument("--seed", type=amounts.whole)          # 0 or more
parser.add_argument("--seconds", type=amounts.amount)      # 0 or more, with a point
parser.add_argument("--bounds", type=amounts.wholes, default="2,0")
"""

import argparse
import math


def count(text: str) -> int:
    return _number(text, 1)


def whole(text: str) -> int:
    return _number(text, 0)


def wholes(text: str) -> list[int]:
    """With commas, each once and in that order."""
    return list(dict.fromkeys(_number(each, 0, ", with commas between several") for each in text.split(",")))


def amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number that is 0 or more")
    return number


def _number(text: str, least: int, more: str = "") -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number that is {least} or more{more}")
    return number
