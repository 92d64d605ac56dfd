"""Training on one client: its module, optimisers, batches and objective, and the executors that run
them."""
