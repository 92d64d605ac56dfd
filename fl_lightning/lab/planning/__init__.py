"""What a run takes, from a round that is rehearsed here; and what `fit` would refuse before its
first round."""
