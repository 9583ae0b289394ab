"""The planner: adds and removes workers as the load changes."""

from dynamo.config.option import preset

__all__: list[str] = []

# Before numpy is imported. The matrices of the predictors are tiny: on a busy box the threads of
# OpenBLAS spin for each other, and a forecast takes ten times as long.
preset("OPENBLAS_NUM_THREADS", "1")
