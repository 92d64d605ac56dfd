"""The time, memory and traffic of a run, measured in a rehearsed round, and the checks that `fit`
makes before its first round."""
