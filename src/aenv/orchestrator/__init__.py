"""The runner: carries out what the lifecycle decides. `Orchestrator` is its public face."""
