"""Where lengths come from: distributions by their quantiles, and recorded traces. Packaged data: see README.md."""

from staleflow.simulate.lengths.checks import WorkloadError
from staleflow.simulate.lengths.distributions import (
    Bimodal,
    Constant,
    Distribution,
    Empirical,
    Lognormal,
    PowerLaw,
    QuantileTable,
    Uniform,
    servegen_r1_output,
)
from staleflow.simulate.lengths.trace import Trace, read_trace

__all__ = [
    "Bimodal",
    "Constant",
    "Distribution",
    "Empirical",
    "Lognormal",
    "PowerLaw",
    "QuantileTable",
    "Trace",
    "Uniform",
    "WorkloadError",
    "read_trace",
    "servegen_r1_output",
]
