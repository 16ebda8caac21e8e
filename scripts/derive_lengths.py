"""Regenerates the packaged table of DeepSeek-R1 output lengths from the summed ServeGen histogram.

python scripts/derive_lengths.py servegen_r1_output_tokens_pmf.csv.gz

The histogram is a CSV with the columns value,probability. The README next to the table says what it promises.
"""

import argparse
import csv
import gzip
from bisect import bisect_left
from pathlib import Path
from statistics import NormalDist

TARGET = Path(__file__).resolve().parent.parent / "staleflow" / "simulate" / "data" / "servegen_r1_output.csv"
QUANTILES = 1024


def read_histogram(path: Path) -> list[tuple[int, float]]:
    """(tokens, probability), ascending, normalised to 1."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = sorted((int(float(row["value"])), float(row["probability"])) for row in csv.DictReader(lines))
    total = sum(probability for _, probability in rows)
    return [(tokens, probability / total) for tokens, probability in rows if probability > 0]


def quantile_points(histogram: list[tuple[int, float]]) -> list[tuple[float, int]]:
    """(probability, tokens) of the histogram's own points that lie nearest an even grid of normal scores.

    A value sits at the middle of its probability mass, so that straight lines between the points keep the mean.
    """
    middles: list[float] = []
    below = 0.0
    for _, probability in histogram:
        middles.append(below + probability / 2)
        below += probability
    normal = NormalDist()
    first, last = normal.inv_cdf(middles[0]), normal.inv_cdf(middles[-1])
    step = (last - first) / (QUANTILES - 3)
    grid = (normal.cdf(first + step * i) for i in range(QUANTILES - 2))
    chosen = sorted({min(bisect_left(middles, u), len(middles) - 1) for u in grid} | {0, len(middles) - 1})
    inner = [(middles[i], histogram[i][0]) for i in chosen]
    return [(0.0, histogram[0][0]), *inner, (1.0, histogram[-1][0])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Derive the packaged table of output lengths.")
    parser.add_argument("histogram", type=Path, help="CSV (or .csv.gz) with the columns value,probability")
    parser.add_argument("--to", type=Path, default=TARGET, help="where to write the table")
    chosen = parser.parse_args()
    points = quantile_points(read_histogram(chosen.histogram))
    lines = [f"{probability:.9g},{tokens}" for probability, tokens in points]
    chosen.to.write_text("\n".join(["probability,tokens", *lines, ""]), encoding="utf-8")
    print(f"{chosen.to}: {len(points)} quantiles")


if __name__ == "__main__":
    main()
