"""What a finished run, or a study, tells of its clients' data: `fl-train audit`."""
