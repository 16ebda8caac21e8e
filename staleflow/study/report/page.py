"""The page: sections of a run, each with its pictures and tables, as one HTML text."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from html import escape
from typing import Any

from staleflow import __version__
from staleflow.config import Config
from staleflow.errors import StaleFlowError
from staleflow.observe.marks import before_and_after, decimal, duration, number, percent
from staleflow.observe.metrics import read_metrics
from staleflow.run.directory import RunDirectory
from staleflow.run.environment import read_environment
from staleflow.run.events import read_commits, read_events
from staleflow.run.listing import Listed, listed_run
from staleflow.study.report.lanes import COLUMNS, timeline
from staleflow.study.report.plots import Row, learning, staleness, time_by_part
from staleflow.study.report.waste import wasted_tokens
from staleflow.study.why import ask
from staleflow.study.why.moments import moments

STYLE = """
body { font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: #222; background: #fff; margin: 0 auto;
       max-width: 1240px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 8px; border-bottom: 1px solid #ddd; }
p.lead { font-size: 16px; } svg { max-width: 100%; height: auto; display: block; margin: 8px 0; }
table { border-collapse: collapse; } td, th { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; }
td { font-variant-numeric: tabular-nums; } pre { background: #f6f6f6; padding: 12px; overflow-x: auto; }
"""


def page(directory: RunDirectory, config: Config) -> str:
    run, summary = listed_run(directory.path), _summary(directory)
    rows = read_metrics(directory.metrics)
    accuracy, binary = _accuracy(directory, summary)
    lanes = timeline(list(moments(directory, most=4 * COLUMNS)), read_commits(directory))
    sections = [
        ("Result", [_result(run, summary, rows)]),
        ("What sets the pace", [_pace(directory, config)]),
        ("Learning", learning(rows, accuracy, binary)),
        ("Staleness", staleness(rows, config.staleness)),
        ("What was not trained on", [_waste(directory, summary, rows)]),
        ("Time", [*time_by_part(rows, config.rollout.instances), lanes]),
        ("What went wrong", [_trouble(summary)]),
        ("How to make it again", [_again(directory, config)]),
        ("Configuration", [f"<pre>{escape(directory.config_file.read_text())}</pre>"]),
    ]
    body = "\n".join(_section(title, parts) for title, parts in sections)
    now = time.strftime("%Y-%m-%d %H:%M")
    state = f"{run.state}, {run.step} of {run.steps} steps; written {now} by staleflow {__version__}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(run.name)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(run.name)}</h1><p>{escape(state)}</p>\n{body}\n"
        "</body></html>\n"
    )


def _section(title: str, parts: Iterable[str]) -> str:
    """Nothing if there is nothing in it."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def _table(values: Mapping[str, Any]) -> str:
    cells = (f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in values.items())
    return f"<table>{''.join(cells)}</table>" if values else ""


def _result(run: Listed, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    last: Row = rows[-1] if rows else {}
    measured: list[Row] = summary.get("accuracy") or []
    found = {
        "steps": f"{run.step} of {run.steps}",
        "time of training": duration(run.seconds) if run.seconds is not None else "-",
        "reward of the latest step": decimal(last.get("reward")),
        "trained tokens": number(sum(row.get("tokens", 0) for row in rows)),
        "trained tokens per second": number(summary.get("trained_tokens_per_s") or 0.0),
    }
    if measured:
        show = (lambda value: percent(value, 1)) if summary.get("binary", True) else decimal
        found["held-out"] = before_and_after(measured, run.step, show)
    if best := summary.get("best"):
        found["best"] = f"{best['figure']} {best['value']:.4g}, version {best['step']}"
    names = {"max_staleness": "oldest token, in steps", "mean_staleness": "staleness of a token, on average"}
    names |= {"violations": "violations of the bound", "lives": "attempts", "stopped_early": "ended early"}
    for name, shown in names.items():
        if (value := summary.get(name)) not in (None, ""):
            found[shown] = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _table(found)


def _pace(directory: RunDirectory, config: Config) -> str:
    with suppress(StaleFlowError):
        sentence = ask(directory, config, "").sentence
        return f'<p class="lead">{escape(sentence[0].upper() + sentence[1:])}.</p>'
    return ""


def _waste(directory: RunDirectory, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    wasted = wasted_tokens(directory)
    trained = sum(row.get("tokens", 0) for row in rows)
    all_made = max(1, trained + sum(wasted.values()))
    found = {cause: f"{made:,} tokens ({percent(made / all_made)} of all)" for cause, made in wasted.items()}
    if lost := summary.get("tokens_lost"):
        found["lost with instances that died, about"] = f"{lost:,} tokens"
    return _table(found) or "<p>Nothing: every response that ended was trained on or still may be.</p>"


def _trouble(summary: Mapping[str, Any]) -> str:
    found = {
        f"{what}: {name}": ", ".join(f"{why} ({count})" for why, count in reasons.items())
        for what in ("restarts", "failures")
        for name, reasons in (summary.get(what) or {}).items()
    }
    return _table(found)


def _again(directory: RunDirectory, config: Config) -> str:
    made = read_environment(directory)
    command = made.get("command", [])
    what = "simulate" if command[1:2] == ["simulate"] else "train"
    lines = [f"staleflow {what} {shlex.quote(str(directory.config_file))}"]
    facts = {"seed": config.seed, "as it was started": shlex.join(command) if command else "not recorded"}
    packages = made.get("packages", {})
    if packages:
        lines.insert(0, "pip install " + " ".join(f"{name}=={version}" for name, version in packages.items()))
        facts |= {"Python": made.get("python"), "platform": made.get("platform"), "cores": made.get("cores")}
    return f"<pre>{escape(chr(10).join(lines))}</pre>{_table(facts)}"


def _accuracy(directory: RunDirectory, summary: Mapping[str, Any]) -> tuple[list[Row], bool]:
    """Every evaluation: from the summary, or of a run that has none yet from the journal."""
    if summary.get("accuracy"):
        return list(summary["accuracy"]), bool(summary.get("binary", True))
    found = [event for _, event in read_events(directory, kinds=["evaluated"])]
    return [{"step": event[1], "accuracy": event[2]} for event in found], all(event[4] for event in found)


def _summary(directory: RunDirectory) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(directory.summary.read_text())
        return found if isinstance(found, dict) else {}
    return {}
