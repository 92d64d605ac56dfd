"""Pictures, drawn without torch in a process beside the training: `process.draw`."""
