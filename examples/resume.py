"""Train for a few steps, then continue the same run for more."""

import sys

import staleflow as sf

steps = 10
settings = sys.argv[1:]
first = sf.train(sf.load("laptop", [f"steps={steps}", *settings]))
more = first.summary["steps"] + steps
second = sf.train(sf.load("laptop", [*settings, f"steps={more}"]), resume=first.run)
print(first.reward, second.reward, second.run == first.run)
