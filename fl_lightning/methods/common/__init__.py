"""What several methods share, or one needs beside its own file: class means, predictions, clusters,
hypernetworks."""
