"""Published benchmarks in their own layouts and protocols, one file each; `metric_training.benchmark` runs them."""
