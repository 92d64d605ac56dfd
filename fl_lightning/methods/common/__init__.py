"""Code that several methods share, or that one needs beside its own file."""
