"""Local training: module, optimisers, batches and objective of a client, and the executors that run
local steps."""
