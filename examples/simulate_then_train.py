"""Choose the bound in the simulator, then train with it."""

import sys

import staleflow as sf

settings = sys.argv[1:]
speeds = {
    bound: sf.simulate(sf.load("laptop", [*settings, f"staleness={bound}"]))["trained_tokens_per_s"]
    for bound in (0, 1, 2)
}
bound = min(each for each, speed in speeds.items() if speed > 0.95 * max(speeds.values()))
print(f"bound {bound}: {speeds[bound]:,.0f} of {max(speeds.values()):,.0f} tokens/s")
result = sf.train(sf.load("laptop", [*settings, f"staleness={bound}"]))
print(result.reward, result.summary["max_staleness"])
