"""What runs with noise must have in common, however they are run."""

from fl_lightning.results.folder import RunFolder


def tables(folder):
    """Both tables, without times and memory."""
    rows = RunFolder(folder).read("metrics") + RunFolder(folder).read("clients")
    clock = ("seconds", "memory")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


def same_everywhere(fit, flags, read=tables):
    """What `read` says of a run, which must be the same on two and three ranks and after a
    resume."""
    flags += " --callbacks.checkpoint.seconds 0"
    undisturbed = read(fit("whole", flags))
    for ranks in (2, 3):
        assert read(fit(f"ranks-{ranks}", flags, f"--fabric.devices {ranks}")) == undisturbed
    fit("part", flags, "--federation.rounds 2")
    assert read(fit("part", flags, "--resume --federation.rounds 3")) == undisturbed
    return undisturbed
