"""Differential privacy: clipping and noise of uploads and of training steps, and the epsilon that
follows, by dp-accounting."""
