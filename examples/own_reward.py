"""Two rewards with weights, and what is called after each step."""

import asyncio
import re
import sys

import staleflow as sf

NUMBER = re.compile(r"-?\d+")


def correct(problem, response):
    """1 if the last number is the right one."""
    found = NUMBER.findall(response.text)
    return float(bool(found) and found[-1] == problem.facts["answer"])


async def judged(problem, response):
    """Where a service would be asked; many are waited for at once if there are several reward.workers."""
    await asyncio.sleep(0)
    return 1.0 if len(response.text) < 40 else 0.0


def show(row):
    print(f"step {row['step']}: reward {row['reward']:.3f}, loss {row['loss']:.4f}")


config = sf.load("arithmetic-smollm", ["steps=20", *sys.argv[1:]])
sf.train(config, reward={correct: 1.0, judged: 0.2}, on_step=show)
